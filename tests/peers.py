"""The peers of `benchmark.py`: TRL's trainers on the same stored trajectories, each in a process.

pip install -r tests/requirements-peers.txt, best into an environment of its own; `benchmark.py`
runs this file.

Each is set up as its user would on one core: float32, no activation checkpointing, no evaluation,
nothing saved, and the fastest sizes below. That each processes exactly the stored tokens is checked
by its attention masks.
"""

import argparse
import random
import sys
from pathlib import Path

from arms import Turns

# Trajectories of one forward, the fastest of 2, 4 and 8 on one core: fewer pads outweigh more
# calls. KTO needs 2, DPO's are pairs, GRPO's the four rollouts of a prompt. Of SFT, rows of 512
# tokens beat 1024: attention pays for whole rows.
PER_DEVICE = {"kto": 2, "dpo": 2, "grpo": 4}
PACKED_LENGTH = 512
SPECIAL = ["<eos>", "<pad>"]


def text(ids: list[int]) -> str:
    """What the made-up tokenizer reads as these ids."""
    return "".join(f" t{i}" if i >= len(SPECIAL) else SPECIAL[i] for i in ids)


def read(folder: Path) -> list[dict]:
    import pyarrow.parquet as pq

    return pq.read_table(folder / "train.parquet").to_pylist()


def datasets_of(arm: str, rows: list[dict], text=text) -> list[dict]:
    """The trajectories in the form that a trainer asks for; `text` decodes ids."""
    if arm == "kto":
        rows = random.Random(0).sample(
            rows, len(rows)
        )  # it pairs neighbours for its KL term: they shall differ
        return [
            {
                "prompt": text(r["prompt_ids"]),
                "completion": text(r["response_ids"]),
                "label": r["reward"] > 0,
            }
            for r in rows
        ]
    if arm == "sft":
        return [
            {
                "input_ids": r["prompt_ids"] + r["response_ids"],
                "labels": [-100] * len(r["prompt_ids"]) + r["response_ids"],
            }
            for r in rows
        ]
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    if arm == "grpo":
        return [{"prompt": text(g[0]["prompt_ids"]), "rollouts": g} for g in groups.values()]
    return [
        {
            "prompt": text(a["prompt_ids"]),
            "chosen": text(a["response_ids"]),
            "rejected": text(b["response_ids"]),
        }
        for group in groups.values()
        for a, b in zip(
            *([r for r in group if (r["reward"] > 0) == good] for good in (True, False)),
            strict=False,
        )
    ]


def counted(trainer: type, turns: Turns) -> type:
    """The trainer's class with its tokens counted, pads left out."""

    class Counted(trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            masks = [
                inputs[name]
                for name in ("attention_mask", "prompt_mask", "completion_mask")
                if name in inputs
            ]
            if "attention_mask" in inputs:
                masks = masks[:1]
            turns.tokens += (
                sum(int(mask.sum()) for mask in masks) if masks else inputs["input_ids"].numel()
            )
            return super().compute_loss(model, inputs, *args, **kwargs)

    return Counted


def with_stored_rollouts(trainer: type) -> type:
    """GRPO's trainer without generation: the k-th repetition of a prompt gets its k-th rollout."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    class Stored(trainer):
        def _generate_and_score_completions(self, inputs):
            seen: dict[str, int] = {}
            rows = []
            for example in inputs:
                k = seen.setdefault(example["prompt"], 0)
                rows.append(example["rollouts"][k])
                seen[example["prompt"]] += 1

            def padded(name: str, side: str = "right") -> torch.Tensor:
                return pad_sequence(
                    [torch.tensor(r[name]) for r in rows], batch_first=True, padding_side=side
                )

            def mask(name: str, side: str = "right") -> torch.Tensor:
                return pad_sequence(
                    [torch.ones(len(r[name]), dtype=int) for r in rows], True, padding_side=side
                )

            completion_mask = mask("response_ids")
            return {
                "prompt_ids": padded("prompt_ids", "left"),
                "prompt_mask": mask("prompt_ids", "left"),
                "completion_ids": padded("response_ids"),
                "completion_mask": completion_mask,
                "old_per_token_logps": padded("ref_logprobs"),
                "advantages": torch.tensor([r["reward"] for r in rows]),
                "num_items_in_batch": completion_mask.sum(),
            }

    return Stored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "arm", help="kto, dpo, grpo or sft; kto+ref and dpo+ref score the reference beforehand"
    )
    parser.add_argument("folder", type=Path, help="policy and trajectories, by benchmark.py")
    parser.add_argument("--batch-size", type=int, required=True, help="trajectories per update")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument(
        "--per-device", type=int, help="trajectories of one forward (sft: tokens of a packed row)"
    )
    parser.add_argument("--precision", default="32-true", help="or bf16-mixed")
    args = parser.parse_args()
    arm, _, reference = args.arm.partition("+")
    import torch

    torch.set_num_threads(1)
    sys.path.remove(str(Path(__file__).parent))  # where TRL would take vllm.py for vLLM
    import trl
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.models.llama import modeling_llama  # noqa: F401 - loaded lazily

    disable_progress_bars()
    trainer, config = getattr(trl, f"{arm.upper()}Trainer"), getattr(trl, f"{arm.upper()}Config")
    rows = read(args.folder)
    tokenizer = AutoTokenizer.from_pretrained(args.folder / "policy")
    decode = text if tokenizer.pad_token in SPECIAL else tokenizer.decode
    turns = Turns()

    class Epochs(TrainerCallback):
        def on_train_begin(self, arguments, state, control, **kwargs):
            turns.begin()

        def on_epoch_end(self, arguments, state, control, **kwargs):
            turns.end(state.global_step)

    more, keywords = {}, {}
    if arm == "sft":
        tokens = sum(len(r["prompt_ids"]) + len(r["response_ids"]) for r in rows)
        length = max(
            args.per_device or PACKED_LENGTH,
            *(len(r["prompt_ids"]) + len(r["response_ids"]) for r in rows),
        )
        per_device, accumulate = 1, max(1, round(tokens / len(rows) * args.batch_size / length))
        more = {"packing": True, "max_length": length, "loss_type": "nll"}
    else:
        per_device = args.per_device or PER_DEVICE[arm]
        accumulate = args.batch_size // per_device
        per_device //= 2 if arm == "dpo" else 1  # in pairs
    if arm == "grpo":
        more = {"num_generations": 4, "steps_per_generation": 1, "beta": 0.0}
        trainer, keywords = (
            with_stored_rollouts(trainer),
            {"reward_funcs": lambda completions, **_: [0.0]},
        )
    if arm in ("kto", "dpo"):
        more = {"max_length": None, "precompute_ref_log_probs": bool(reference)}
    settings = config(
        output_dir=str(args.folder / "trl"),
        per_device_train_batch_size=per_device,
        num_train_epochs=args.epochs,
        gradient_accumulation_steps=accumulate,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=args.precision == "bf16-mixed",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **more,
    )
    counted(trainer, turns)(
        model=AutoModelForCausalLM.from_pretrained(args.folder / "policy", dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list(datasets_of(arm, rows, decode)),
        processing_class=tokenizer,
        callbacks=[Epochs()],
        **keywords,
    ).train()


if __name__ == "__main__":
    main()
