"""Real offline data: solutions of real models to GSM8K questions, with their real correctness."""

import json
import re
from itertools import cycle

import numpy as np
import pytest
import torch
from conftest import ROOT, SHARED
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import evaluate
import train
from topr.policy import Policy, encode_prompt, export_policy
from topr.reproduce.making import imitate
from topr.tasks import GSM8K
from topr.trajectories import read_trajectories
from topr.trajectories.__main__ import main as trajectories_main

SOLUTIONS = SHARED / "gsm8k_example_model_solutions.jsonl"
pytestmark = pytest.mark.skipif(
    not SOLUTIONS.exists(), reason=f"needs the GSM8K solutions at {SOLUTIONS}"
)


def make_llama(folder, texts, hidden: int = 64, layers: int = 2):
    """A small random Llama with a byte-pair tokenizer trained on `texts`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=2000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2000, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    policy = Policy(LlamaForCausalLM(config), tokenizer, str(folder))
    export_policy(policy, folder)
    return policy


@pytest.mark.slow
def test_gsm8k_solutions_of_four_models_are_imported_and_trained_on(run, tmp_path):
    questions = [
        json.loads(line) for line in (SHARED / "gsm8k_train.jsonl").read_text().splitlines()
    ]
    tokenizer = make_llama(
        tmp_path / "base", [row["question"] + "\n" + row["answer"] for row in questions]
    ).tokenizer
    rows = []
    for number, line in enumerate(SOLUTIONS.read_text().splitlines()[:60]):
        row = json.loads(line)
        for solution in (value for value in row.values() if isinstance(value, dict)):
            rows.append({
                "prompt": row["question"] + "\n", "response": solution["solution"], "reward": solution["is_correct"],
                "prompt_id": str(number), "gold": row["ground_truth"],
            })  # fmt: skip
    assert len(rows) == 240
    (tmp_path / "solutions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["import", "solutions.jsonl", "--policy", tmp_path / "base", "--out", "gsm8k.parquet"]
    code, out, err = run(trajectories_main, *command)
    assert code == 0, err
    trajectories = read_trajectories(tmp_path / "gsm8k.parquet")
    correct = np.mean([row["reward"] for row in rows])
    assert f"{correct:.1%}, effective share" in out and "240 of 60 prompts" in out
    for row, t in zip(rows, trajectories, strict=True):
        assert tokenizer.decode(t.response_ids[:-1]) == row["response"] and t.finished
        assert t.reward == (1 if row["reward"] else -1)
        # an untrained model knows next to nothing: about log(vocabulary) a token
        assert np.mean(t.ref_logprobs) == pytest.approx(-np.log(2000), abs=1)
    code, out, err = run(
        train.main, "fit", "--config", ROOT / "configs" / "arithmetic.yaml", f"--model.policy={tmp_path / 'base'}",
        "--data.train=gsm8k.parquet", "--data.val=null", "--data.test=null", "--data.microbatch_tokens=4096",
        "--trainer.enable_progress_bar=false", "--data.batch_size=32",
    )  # fmt: skip
    assert code == 0, err
    summary = json.loads(
        (tmp_path / "runs" / "arithmetic" / "version_0" / "summary.json").read_text()
    )
    assert (summary["steps"], summary["trajectories"]) == (8, 240)
    assert summary["max_abs_log_ratio_at_start"] < 1e-2


CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.slow
def test_the_whole_path_on_real_questions_with_the_shipped_config(run, tmp_path):
    """Imitate gold solutions for seconds, then sample, grade, score, train an epoch, evaluate, import, inspect."""
    lines = (SHARED / "gsm8k_train.jsonl").read_text().splitlines(True)
    rows, task = [json.loads(line) for line in lines], GSM8K()
    solutions = [
        re.sub(r"<<.*?>>", "", row["answer"])
        .replace("\n#### ", " The answer is ")
        .replace("\n", " ")
        for row in rows
    ]
    assert all(
        task.grade(s, task.problem(r, 0).gold).reward == 1
        for s, r in zip(solutions, rows, strict=True)
    )
    policy = make_llama(tmp_path / "base", [row["question"] + " " + row["answer"] for row in rows])
    tokenizer = policy.tokenizer
    tokenizer.chat_template = CHAT
    prompts = [
        encode_prompt(task.prompt(task.problem(row, 0), tokenizer), tokenizer)[0] for row in rows
    ]
    easy = [
        i for i in range(len(rows)) if len(rows[i]["question"]) < 110 and len(solutions[i]) < 130
    ]
    imitate(policy, ((prompts[i], solutions[i], True) for i in cycle(easy)), steps=40)
    export_policy(policy, tmp_path / "base")

    (tmp_path / "train.jsonl").write_text("".join(lines[i] for i in easy[:8]))
    (tmp_path / "test.jsonl").write_text(
        "".join((SHARED / "gsm8k_test.jsonl").read_text().splitlines(True)[:3])
    )
    config = ["--config", ROOT / "configs" / "gsm8k.yaml", "--trainer.enable_progress_bar=false"]
    config += [
        "--model.policy=base",
        "--data.problems=train.jsonl",
        "--data.val=test.jsonl",
        "--data.test=test.jsonl",
    ]
    code, out, err = run(train.main, "predict", *config)
    assert code == 0 and "128 trajectories are under runs/gsm8k/trajectories" in out, err
    sampled = read_trajectories(tmp_path / "runs" / "gsm8k" / "trajectories" / "part-00000.parquet")
    assert len({t.prompt for t in sampled}) == 8 and all(
        t.prompt.startswith("user: ") for t in sampled
    )
    for t in sampled:
        assert (t.reward, t.valid, t.answer) == task.grade(
            t.response.split("\nQuestion:")[0], t.gold
        )
    assert sum(t.valid for t in sampled) > 0  # it has learnt to say "The answer is"
    code, out, err = run(train.main, "fit", *config)
    assert code == 0, err
    folder = tmp_path / "runs" / "gsm8k" / "version_0"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["trajectories"], summary["after"]["samples"]) == (1, 128, 16)

    code, out, err = run(
        evaluate.main, "--policy", "base", folder / "policy", "--benchmark", "gsm8k=test.jsonl", "--samples", 2,
        "--max-new-tokens", 64, "--out", "results",
    )  # fmt: skip
    assert code == 0 and "Difference to base" in out, err
    texts = [
        {"prompt": t.prompt, "response": t.response, "reward": t.reward}
        for t in sampled
        if t.response
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    command = ["import", "mine.jsonl", "--policy", "base", "--out", "mine.parquet"]
    assert run(trajectories_main, *command)[0] == 0
    code, out, err = run(trajectories_main, "inspect", "mine.parquet")
    assert code == 0 and f"{len(texts)} of 8 prompts" in out, err
