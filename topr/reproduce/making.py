"""Make base policies, problems and trajectories of the embedded task."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from topr.batching import pack
from topr.evaluation import SamplingJob, sample_and_grade
from topr.io import write_text
from topr.policy import Policy, export_policy, load_policy
from topr.policy.model import check_forward
from topr.sampling import LocalSampler
from topr.tasks.arithmetic import Arithmetic, Errors
from topr.tasks.task import Problem, Task
from topr.trajectories import Trajectory

SYMBOLS = ["<pad>", "<eos>", "<unk>", *"0123456789", *"+-*=;#>"]
DIRECT, MISSING, WRONG = (
    0.20,
    0.12,
    0.10,
)  # rates of critiques without steps, of those without verdict, of wrong digits


def make_tokenizer(extra: str = "") -> PreTrainedTokenizerFast:
    """A tokenizer of one token per character, for `SYMBOLS` and the extra characters."""
    vocabulary = {symbol: i for i, symbol in enumerate(dict.fromkeys([*SYMBOLS, *extra]))}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=characters, **special, model_max_length=128)


def make_policy(tokenizer: PreTrainedTokenizerFast) -> Policy:
    """A randomly initialised Llama with 160k parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=128, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    policy = Policy(LlamaForCausalLM(config), tokenizer, "the base policy")
    check_forward(policy)  # enables rows without padding
    return policy


def imitate(
    policy: Policy,
    demonstrations: Iterator[tuple[str, str, bool]],
    steps: int,
    lr: float = 3e-3,
    batch_size: int = 96,
) -> None:
    """Supervised training in place, on prompts, responses, and whether each response ends.
    It stops after the first third of a cosine schedule, so that there is room to improve."""
    tokenizer, end = policy.tokenizer, [policy.tokenizer.eos_token_id]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * steps)
    for step in range(1, steps + 1):
        prompts, responses, finished = zip(*islice(demonstrations, batch_size), strict=True)
        prompt_ids = [np.array(ids) for ids in tokenizer(list(prompts))["input_ids"]]
        rows = zip(tokenizer(list(responses))["input_ids"], finished, strict=True)
        response_ids = [np.array(ids + end * ends, dtype=int) for ids, ends in rows]
        loss = -policy(pack(prompt_ids, response_ids))[0].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"base policy: step {step} of {steps}, loss {loss.item():.3f}", flush=True)


def sample(
    policy: Policy, task: Task, problems: list[Problem], n: int, seed: int
) -> list[Trajectory]:
    """n graded responses to each problem."""
    return sample_and_grade(LocalSampler(), policy, task, problems, n, task.sampling, seed)


def sample_to(
    path: Path, policy: Policy, task: Task, problems: list[Problem], n: int, seed: int
) -> None:
    """Write n graded and scored responses to each problem."""
    job = SamplingJob(policy.name, task, problems, n, task.sampling, seed)
    job.sample_part(path, problems, LocalSampler(), policy)


def make(
    task: Arithmetic,
    out: Path,
    seed: int,
    steps: list[int],
    lr: list[float],
    batch_size: int,
    samples: int,
    **n: int,
) -> None:
    """Write a base policy, n problems of train, val and test, and `samples` graded, scored trajectories of each train
    problem (0: no such file) under `out`. The policy is trained in stages: `steps` updates of `batch_size`
    demonstrations at the learning rate `lr`."""
    splits = {}
    for i, split in enumerate(("train", "val", "test"), start=1):
        splits[split] = task.distinct(split, n[split], np.random.default_rng([seed, i]))
        rows = [
            {"id": problem.id, "prompt": problem.prompt, "gold": problem.gold}
            for problem in splits[split]
        ]
        write_text(out / f"{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    torch.manual_seed(seed)
    rng = np.random.default_rng([seed, 0])
    policy = make_policy(
        make_tokenizer(task.filler.symbols + task.filler.separators if task.filler else "")
    )
    demonstrations = (
        (prompt, *task.demonstration(prompt, task.errors, rng)) for prompt in task.base(rng)
    )
    for number, rate in zip(steps, lr, strict=True):
        imitate(policy, demonstrations, number, rate, batch_size)
    export_policy(policy, out / "base")
    if samples:
        sample_to(
            out / "train.parquet",
            load_policy(str(out / "base")),
            task,
            splits["train"],
            samples,
            seed,
        )


def critique(correct: str, solution: str, is_correct: bool, rng: np.random.Generator) -> str:
    """An imperfect critique of a solution, by comparison with a correct one."""
    steps, expected = (text.split("#")[0].split(";")[:-1] for text in (solution, correct))
    digits = [i < len(expected) and step == expected[i] for i, step in enumerate(steps)]
    written = "".join(str(int(digit ^ (rng.random() < WRONG))) for digit in digits[:9])
    verdict = f"#{int(is_correct ^ (rng.random() < WRONG))}"
    if rng.random() < DIRECT:
        return verdict
    return written + ("" if rng.random() < MISSING else verdict)


def judgements(task: Arithmetic, rng: np.random.Generator) -> Iterator[tuple[str, str, bool]]:
    """Endless verifier prompts with imperfect critiques, of correct and incorrect solutions in turn."""
    wanted = True
    for prompt in task.base(rng):
        correct, _ = task.demonstration(prompt, Errors(0, 0, 0, 0, 0), rng)
        for _ in range(100):
            solution, finished = task.demonstration(prompt, Errors(), rng)
            if (finished and task.grade(solution, correct.split("#")[1]).reward > 0) == wanted:
                yield f"{prompt}{solution}>", critique(correct, solution, wanted, rng), True
                wanted = not wanted
                break
