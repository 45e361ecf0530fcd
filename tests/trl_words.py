"""TRL's KTO or DPO on the trajectories of the study on word problems, in an environment of peers.

peers/bin/python tests/trl_words.py kto --policy BASE --data FILE --rate 1e-5 --out DIR

Writes a policy to DIR, and prints minutes and peak memory; `train.py predict` measures the policy.
As in the study: AdamW at a constant rate, an epoch but at most 60 updates of 32 trajectories (16
pairs), bfloat16 arithmetic over float32 weights.
"""

import argparse
import os
import resource
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import pyarrow.parquet as pq
import torch
import trl
from datasets import Dataset
from peers import PER_DEVICE, datasets_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import modeling_llama  # noqa: F401 - loaded lazily

BATCH_SIZE = 32  # trajectories of an update
UPDATES = 60  # at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loss", choices=["kto", "dpo"])
    parser.add_argument("--policy", required=True)
    parser.add_argument("--data", required=True, help="trajectory file")
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    tokenizer = AutoTokenizer.from_pretrained(args.policy)
    rows = pq.read_table(args.data).to_pylist()
    examples = Dataset.from_list(datasets_of(args.loss, rows, tokenizer.decode))
    per_example = 2 if args.loss == "dpo" else 1
    config = getattr(trl, f"{args.loss.upper()}Config")(
        output_dir=str(args.out),
        per_device_train_batch_size=PER_DEVICE[args.loss] // per_example,
        gradient_accumulation_steps=BATCH_SIZE // PER_DEVICE[args.loss],
        max_steps=min(UPDATES, len(examples) * per_example // BATCH_SIZE),
        learning_rate=args.rate,
        lr_scheduler_type="constant",
        weight_decay=0.01,  # torch's default
        max_length=None,
        precompute_ref_log_probs=True,
        use_cpu=True,
        bf16=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=args.seed,
    )
    began = time.time()
    trainer = getattr(trl, f"{args.loss.upper()}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(args.policy, dtype=torch.float32),
        args=config,
        train_dataset=examples,
        processing_class=tokenizer,
    )
    trainer.train()
    minutes = (time.time() - began) / 60
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    trainer.model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{minutes:.1f} minutes, {memory:.1f} GB")


if __name__ == "__main__":
    main()
