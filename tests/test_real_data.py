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

import train
from data.arithmetic.imitation import imitate
from topr.policy import Policy, encode_prompt, export_policy
from topr.tasks import GSM8K, Problem
from topr.trajectories import read_trajectories
from topr.trajectories.__main__ import main as trajectories_main

SOLUTIONS = SHARED / "gsm8k_example_model_solutions.jsonl"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SOLUTIONS.exists(), reason=f"needs the GSM8K solutions at {SOLUTIONS}"),
]
VOCABULARY = 2000
CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_llama(folder, texts) -> Policy:
    """A small random Llama with a byte-pair tokenizer trained on `texts`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    policy = Policy(LlamaForCausalLM(config), tokenizer, str(folder))
    export_policy(policy, folder)
    return policy


def write_rows(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_gsm8k_solutions_of_four_models_are_imported_and_trained_on(run, tmp_path):
    questions = read_rows(SHARED / "gsm8k_train.jsonl")
    tokenizer = make_llama(tmp_path / "base", [row["answer"] for row in questions]).tokenizer
    rows = []
    for row in read_rows(SOLUTIONS)[:60]:
        for solution in row.values():
            if isinstance(solution, dict):
                rows.append(
                    {
                        "prompt": row["question"] + "\n",
                        "response": solution["solution"],
                        "reward": solution["is_correct"],
                    }
                )
    write_rows(tmp_path / "solutions.jsonl", rows)
    command = ["import", "solutions.jsonl", "--policy", tmp_path / "base", "--out", "gsm8k.parquet"]
    code, out, err = run(trajectories_main, *command)
    assert code == 0, err
    assert "240 trajectories" in out
    trajectories = read_trajectories(tmp_path / "gsm8k.parquet")
    for row, t in zip(rows, trajectories, strict=True):
        assert tokenizer.decode(t.response_ids[:-1]) == row["response"] and t.finished
        assert t.reward == (1 if row["reward"] else -1)
        # an untrained model knows next to nothing: about log(vocabulary) a token
        assert np.mean(t.ref_logprobs) == pytest.approx(-np.log(VOCABULARY), abs=1)
    code, out, err = run(
        train.main, "fit", "--config", ROOT / "configs" / "arithmetic.yaml",
        f"--model.policy={tmp_path / 'base'}", "--data.train=gsm8k.parquet", "--data.val=null",
        "--data.test=null", "--data.microbatch_tokens=4096", "--data.batch_size=32",
        "--trainer.enable_progress_bar=false",
    )  # fmt: skip
    assert code == 0, err
    folder = tmp_path / "runs" / "arithmetic" / "version_0"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["trajectories"]) == (8, 240)
    assert summary["max_abs_log_ratio_at_start"] < 1e-2


def test_the_whole_path_on_real_questions_with_the_shipped_config(run, tmp_path):
    """Imitate gold solutions for seconds, then sample, grade, score and train an epoch."""
    rows = read_rows(SHARED / "gsm8k_train.jsonl")
    task = GSM8K()
    solutions = []
    for row in rows:
        text = re.sub(r"<<.*?>>", "", row["answer"]).replace("\n#### ", " The answer is ")
        solutions.append(text.replace("\n", " "))
        assert task.grade(solutions[-1], task.gold(row["answer"])).reward == 1
    policy = make_llama(tmp_path / "base", [row["question"] for row in rows] + solutions)
    policy.tokenizer.chat_template = CHAT
    short = [len(row["question"]) < 110 for row in rows]
    easy = [i for i, text in enumerate(solutions) if short[i] and len(text) < 130]
    demonstrations = []
    for i in easy:
        prompt = task.prompt(Problem("", rows[i]["question"], ""), policy.tokenizer)
        text, _ = encode_prompt(prompt, policy.tokenizer)
        demonstrations.append((text, solutions[i] + policy.tokenizer.eos_token))
    imitate(policy, cycle(demonstrations), steps=40)
    export_policy(policy, tmp_path / "base")

    write_rows(tmp_path / "train.jsonl", [rows[i] for i in easy[:8]])
    write_rows(tmp_path / "test.jsonl", read_rows(SHARED / "gsm8k_test.jsonl")[:3])
    config = [
        "--config", ROOT / "configs" / "gsm8k.yaml", "--trainer.enable_progress_bar=false",
        "--model.policy=base", "--data.problems=train.jsonl", "--data.val=test.jsonl",
        "--data.test=test.jsonl",
    ]  # fmt: skip
    code, out, err = run(train.main, "predict", *config)
    assert code == 0, err
    sampled = read_trajectories(tmp_path / "runs" / "gsm8k" / "trajectories" / "part-00000.parquet")
    assert len(sampled) == 128 and len({t.prompt for t in sampled}) == 8
    for t in sampled:
        assert t.prompt.startswith("user: ")
        response = t.response.split("\nQuestion:")[0]
        assert (t.reward, t.valid, t.answer) == task.grade(response, t.gold)
    assert sum(t.valid for t in sampled) > 0  # it has learnt to say "The answer is"
    code, out, err = run(train.main, "fit", *config)
    assert code == 0, err
    folder = tmp_path / "runs" / "gsm8k" / "version_0"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["trajectories"], summary["after"]["samples"]) == (1, 128, 16)
