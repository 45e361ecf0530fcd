"""Real offline data: solutions of real models to GSM8K questions, with their real correctness."""

import json

import numpy as np
import pytest
import torch
from conftest import ROOT, SHARED
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import train
from topr.policy import export_policy
from topr.trajectories import main as trajectories_main
from topr.trajectories import read_trajectories

SOLUTIONS = SHARED / "gsm8k_example_model_solutions.jsonl"
pytestmark = pytest.mark.skipif(not SOLUTIONS.exists(), reason=f"needs the GSM8K solutions at {SOLUTIONS}")


def make_llama(folder, texts, hidden: int = 64, layers: int = 2):
    """A small random Llama with a byte-pair tokenizer trained on `texts`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=2000, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2000, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    export_policy(LlamaForCausalLM(config), tokenizer, folder)
    return tokenizer


def test_gsm8k_solutions_of_four_models_are_imported_and_trained_on(run, tmp_path):
    questions = [json.loads(line) for line in (SHARED / "gsm8k_train.jsonl").read_text().splitlines()]
    tokenizer = make_llama(tmp_path / "base", [row["question"] + "\n" + row["answer"] for row in questions])
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
    assert f"p = {correct:.3f}" in out and "240 of 60 prompts" in out
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
    summary = json.loads((tmp_path / "runs" / "arithmetic" / "version_0" / "summary.json").read_text())
    assert (summary["steps"], summary["trajectories"]) == (8, 240)
    assert summary["max_abs_log_ratio_at_start"] < 1e-2
