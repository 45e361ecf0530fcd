"""Make a start for the word problems: a small language model that has imitated solutions.

python data/word_problems/make.py --policy HuggingFaceTB/SmolLM2-135M-Instruct --out start
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from jsonargparse import auto_cli
from jsonargparse.typing import PositiveInt
from transformers import AutoModelForCausalLM, AutoTokenizer

from topr.io import explained, write_text
from topr.io.commands import ArgumentParser, command
from topr.iterate import LOGGER, train
from topr.policy import Policy, export_policy, load_tokenizer
from topr.tasks import GSM8K, Problem
from topr.trajectories.importing import import_files
from topr.trajectories.rows import load_rows

DATA = Path(__file__).parent
CONFIGS = DATA.parents[1] / "configs"


def make(
    policy: str,
    out: Path,
    solutions: PositiveInt = 1200,
    problems: PositiveInt = 800,
    tests: PositiveInt = 160,
):
    """Write a policy that has imitated solutions, and the problems of its training and its tests.

    Args:
        policy: to start from: a folder, a hub name, or a GGUF file
        out: folder to write
        solutions: of the first train problems, which it imitates
        problems: to train on, the last of the train problems
        tests: problems of val, of test and of svamp
    """
    if policy.endswith(".gguf"):
        convert(Path(policy), out / "model")
        policy = str(out / "model")
    rows = load_rows(DATA / "train.jsonl.gz", {})
    dev = load_rows(DATA / "dev.jsonl.gz", {})
    write_lines(out / "train.jsonl", rows[-problems:])
    write_lines(out / "val.jsonl", dev[:tests])
    write_lines(out / "test.jsonl", dev[-tests:])
    write_lines(out / "svamp.jsonl", load_rows(DATA / "svamp.jsonl.gz", {})[:tests])

    task = GSM8K()
    tokenizer = load_tokenizer(policy)
    imitated = [
        {
            "prompt": task.prompt(Problem("", row["question"], ""), tokenizer),
            "response": row["solution"],
            "reward": 1,
        }
        for row in rows[:solutions]
    ]
    write_lines(out / "solutions.jsonl", imitated)
    solved = str(out / "solutions.parquet")
    import_files([str(out / "solutions.jsonl")], policy, solved, overwrite=True)
    train(
        "fit",
        f"--config={CONFIGS / 'word_problems.yaml'}",
        f"--config={CONFIGS / 'loss/positives_only.yaml'}",
        f"--model.policy={policy}",
        f"--data.train={solved}",
        "--data.val=null",
        "--data.test=null",
        "--data.batch_size=32",
        "--model.optimizer.init_args.lr=1e-4",
        f"{LOGGER}.save_dir={out}",
        f"{LOGGER}.name=imitation",
        "--ckpt_path=last",
    )
    (out / "base").unlink(missing_ok=True)
    (out / "base").symlink_to("imitation/version_0/policy")


def write_lines(path: Path, rows: list[dict]):
    """Write rows as JSON lines."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def convert(file: Path, out: Path):
    """Write the Llama model of a GGUF file, whose weights can be rounded, as an ordinary policy."""
    with explained(
        f"{file} cannot be converted",
        remedy="give a file of a Llama model, and `pip install gguf==0.19.0`",
    ):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
    # transformers refuses to save what it takes for quantised weights
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    del model.config.quantization_config
    export_policy(Policy(model, tokenizer, str(file)), out)


if __name__ == "__main__":
    with command():
        auto_cli(make, as_positional=False, parser_class=ArgumentParser)
