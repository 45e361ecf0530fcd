"""Small models, tokenizers and trajectory files that the tests make; nothing is fetched."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from transformers import LlamaConfig, LlamaForCausalLM

import train
from data.arithmetic.imitation import SYMBOLS, make_tokenizer
from topr.policy.files import load_tokenizer, resolve_policy, vocabulary_and_context
from topr.policy.model import Policy, export_policy, load_policy
from topr.run.identity import policy_hash, tokenizer_hash
from topr.trajectories import Trajectory, add_log_probs, write_trajectories

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared" / "data"
TWO_RANKS = {
    "ddp": ["--trainer.strategy=ddp", "--trainer.devices=2"],
    "fsdp": ["--config", ROOT / "configs" / "fsdp.yaml", "--trainer.devices=2"]
    + ["--trainer.strategy.init_args.data_parallel_size=2"],
}


def slow(*values):
    """A case of a parametrised test that stays out of the fast tier."""
    return pytest.param(*values, marks=pytest.mark.slow)


def on_ranks(count: int, folder: Path, *commands: list | dict) -> list[tuple[list[int], str]]:
    """Run commands of train.py one after another in `count` processes, as torchrun starts them.

    Args:
        count: number of processes.
        folder: where they run.
        commands: the arguments of each command, or a dictionary of `arguments` and what `ranks.py`
            takes beside them.

    Returns:
        For each command the exit code of every rank, and what all ranks printed.
    """
    todo = [
        command if isinstance(command, dict) else {"arguments": command} for command in commands
    ]
    output = Path(tempfile.mkdtemp(dir=folder, prefix="output-"))
    (output / "commands.json").write_text(json.dumps(todo, default=str))
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={count}",
    ]
    done = subprocess.run(
        [*launch, ROOT / "tests" / "ranks.py", output / "commands.json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = []
    for i in range(len(commands)):
        codes = [int((output / f"code-{i}-{rank}").read_text()) for rank in range(count)]
        results.append(
            (codes, "".join((output / f"output-{i}-{rank}").read_text() for rank in range(count)))
        )
    return results


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


def clear_caches() -> None:
    """Forget what was read of policies."""
    for cached in (resolve_policy, vocabulary_and_context, load_tokenizer):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def fresh_caches():
    """Tests change the files of policies and the working folder."""
    clear_caches()


def make_policy(folder: Path, seed: int = 0, scale: float = 0.1, **changes) -> Path:
    """A random two-layer Llama with the arithmetic tokenizer."""
    torch.manual_seed(seed)
    arguments = {
        "vocab_size": len(SYMBOLS),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": scale,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    export_policy(
        Policy(LlamaForCausalLM(LlamaConfig(**arguments | changes)), make_tokenizer(), str(folder)),
        folder,
    )
    return folder


def make_trajectories(
    policy: Path,
    count: int = 23,
    seed: int = 0,
    shift: float = 0.0,
    group: int = 4,
    turns: bool = False,
):
    """Random trajectories of uneven lengths with log mu scored by `policy`, moved by noise of size
    `shift`. With `turns`, most of them hold tokens that were not sampled."""
    rng = np.random.default_rng(seed)
    tokenizer, trajectories = load_tokenizer(str(policy)), []
    for i in range(count):
        finished = bool(rng.random() < 0.7)
        prompt_ids = rng.integers(3, len(SYMBOLS), rng.integers(1, 9)).tolist()
        if i % group:
            prompt_ids = trajectories[-1].prompt_ids
        response_ids = rng.integers(3, len(SYMBOLS), rng.integers(1, 15)).tolist() + [1] * finished
        trajectories.append(
            Trajectory(
                prompt_id=str(i // group),
                group=str(i // group),
                prompt=tokenizer.decode(prompt_ids),
                prompt_ids=prompt_ids,
                response=tokenizer.decode(response_ids[: len(response_ids) - finished]),
                response_ids=response_ids,
                ref_logprobs=[],
                reward=1.0 if rng.random() < 0.4 else -1.0,
                finished=finished,
            )
        )
    for trajectory in trajectories if turns else ():
        if rng.random() < 0.8:
            trajectory.sampled = (rng.random(len(trajectory.response_ids)) < 0.5).tolist()
            trajectory.sampled[rng.integers(len(trajectory.sampled))] = True
    trajectories[0].reward, trajectories[1].reward = 1.0, -1.0
    add_log_probs(load_policy(str(policy)), trajectories, 16384)
    for trajectory in trajectories:
        # an offset per trajectory, over its tokens: sequence ratios on both sides of every limit
        offset = shift * rng.normal() / len(trajectory.ref_logprobs)
        trajectory.ref_logprobs = [min(value - offset, -1e-4) for value in trajectory.ref_logprobs]
    return trajectories


def score(policy: Policy, prompts: list, responses: list, tokens: int) -> list[list[float]]:
    """Log mu of responses, in rows of at most so many tokens."""
    rows = []
    for prompt, response in zip(prompts, responses, strict=True):
        rows.append(Trajectory("", "", "", list(prompt), "", list(response), [], 1.0, True))
    add_log_probs(policy, rows, tokens)
    return [row.ref_logprobs for row in rows]


def write(path: Path, sampler: Path, trajectories: list[Trajectory], **metadata) -> Path:
    """A trajectory file that names the policy `sampler`, unless `metadata` says otherwise."""
    known = {
        "tokenizer": tokenizer_hash(load_tokenizer(str(sampler))),
        "policy": policy_hash(str(sampler)),
        "precision": "32-true",
    }
    write_trajectories(path, trajectories, known | metadata)
    return path


@pytest.fixture(scope="session")
def policy(tmp_path_factory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy") / "base")


@pytest.fixture
def tiny(tmp_path) -> tuple[Path, list]:
    """A policy in base/, and arguments of train.py for it, its trajectories and five problems."""
    policy = make_policy(tmp_path / "base", scale=0.5)
    data = write(tmp_path / "train.parquet", policy, make_trajectories(policy))
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(5)))
    files = [f"--model.policy={policy}", f"--data.train={data}"]
    files += [f"--data.{split}={problems}" for split in ("val", "test", "problems")]
    return policy, ["--config", ROOT / "configs" / "arithmetic.yaml", *files, "--data.samples=3"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command in a folder of its own: exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)

    def run(main, *arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    run.folder = tmp_path
    return run


class Recorder(Callback):
    """Keeps what training computes; give `--trainer.callbacks+=conftest.Recorder`."""

    updates: list = []  # the batches of all runs since `clear`
    rows: list = []  # what each did to its trajectories

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.updates.append(batch)
        self.rows.append(outputs["columns"])

    @classmethod
    def clear(cls) -> None:
        cls.updates.clear()
        cls.rows.clear()


def listing(folder: Path) -> dict[str, tuple]:
    """The files under a folder but locks, links not followed."""
    files = [
        path
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir() and path.name != ".lock"
    ]
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in files}


def rejected(run, words: str, *arguments, main=train.main) -> str:
    """Run, and check that it ends as bad input should: exit code 2, one sentence, no files.

    Returns the sentence."""
    before = listing(run.folder)
    code, out, err = run(main, *arguments)
    lines = [line for line in err.splitlines() if not line.startswith("INFO")]
    assert code == 2, f"exit code {code}\n{out}\n{err}"
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    assert words in lines[0], lines[0]
    assert len(lines[0]) < 500 and lines[0].isprintable(), lines[0]
    assert listing(run.folder) == before
    return lines[0]
