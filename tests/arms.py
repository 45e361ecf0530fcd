"""Our arms of `benchmark.py`, one of them a process: training, sampling, the data path; and what all arms share."""

import argparse
import json
import os
import sys
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

ENDS = 5  # of the 512 tokens, near enough equally likely, end a sampled response


class Turns:
    """An arm's epochs, one at a time: at the end of each it tells what the epoch took and waits for its next turn.

    An epoch lasts from the end of the one before, so all that happens between updates is in it. Memory is the peak of
    the resident set above that after the imports: weights, gradients, optimiser state, any reference model,
    activations.
    """

    def __init__(self):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self.base, self.tokens, self.steps = resident("VmRSS"), 0, 0
        self.begin()

    def begin(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def end(self, steps: int) -> None:
        """An epoch is over, after `steps` updates in all."""
        took = {"cpu": time.process_time() - self.cpu, "wall": time.perf_counter() - self.wall}
        took |= {
            "tokens": self.tokens,
            "steps": steps - self.steps,
            "memory": resident("VmHWM") - self.base,
        }
        print("took " + json.dumps(took), flush=True)
        self.tokens, self.steps = 0, steps
        if not sys.stdin.readline():
            raise SystemExit
        self.begin()


def resident(name: str) -> int:
    """Bytes of this process by a line of its status: VmRSS, VmHWM (the peak) or RssAnon (what belongs to no file)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def lengths(rng: np.random.Generator, mean: float, count: int, most: int) -> np.ndarray:
    """Log-normal with a deviation of half the mean, cut off at 4 and `most`."""
    drawn = rng.lognormal(np.log(mean) - 0.223 / 2, 0.223**0.5, count)
    return np.clip(drawn.round().astype(int), 4, most)


def trajectories(args: argparse.Namespace, files: str):
    """The project's data module; batches keep the four responses to a prompt together, as those of the peers do."""
    from topr.datamodule import TrajectoryDataModule
    from topr.losses import TOPR
    from topr.tasks import Arithmetic

    return TrajectoryDataModule(
        str(args.folder / "policy"),
        TOPR(),
        Arithmetic(),
        train=str(args.folder / files),
        whole_groups=True,
        batch_size=args.batch_size,
        microbatch_tokens=args.microbatch_tokens,
    )


def ours(args: argparse.Namespace) -> None:
    """Train by the project's own trainer, module and data module, as `train.py fit` does."""
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    # some are loaded later otherwise, as the peers' are loaded before their turns begin
    import datasets  # noqa: F401
    import pyarrow.parquet as pq
    import torch
    import torch.utils.tensorboard
    import transformers.models.llama.modeling_llama  # noqa: F401
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.loggers import TensorBoardLogger

    from topr.losses import TOPR
    from topr.module import PolicyModule
    from topr.tasks import Arithmetic

    rows = pq.read_table(
        args.folder / "train.parquet", columns=["prompt_ids", "response_ids"]
    ).to_pylist()
    length = torch.tensor([len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows])
    turns = Turns()

    class Epochs(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            turns.tokens += int(length[batch.trajectory_B[batch.real_B > 0]].sum())

        def on_train_epoch_end(self, trainer, module):
            turns.end(trainer.global_step)

    def optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=1e-5, fused=True)  # fused: the peers' default

    Trainer(
        accelerator="cpu", max_epochs=args.epochs, gradient_clip_val=1.0, log_every_n_steps=1, num_sanity_val_steps=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        logger=TensorBoardLogger(args.folder / "runs"), callbacks=[Epochs()],
    ).fit(
        PolicyModule(
            str(args.folder / "policy"), Arithmetic(), TOPR(), optimizer, compile=args.arm == "compiled", threads=1
        ),
        trajectories(args, "train.parquet"),
    )  # fmt: skip


def sample(args: argparse.Namespace) -> None:
    """Sample 4 responses to each prompt a turn: `sampler` by the project's own, `generate` by transformers alone.

    There are as many prompts as rows, so four times as many responses as fit side by side.
    """
    import torch

    from topr.policy import load_policy
    from topr.sampling import LocalSampler, Sampling

    torch.set_num_threads(1)
    turns = Turns()
    policy = load_policy(str(args.folder / "policy")).eval()
    model, tokenizer = policy.model, policy.tokenizer
    model.generation_config.eos_token_id = list(range(ENDS))
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(ENDS, 512, length).tolist()
        for length in lengths(rng, 100, args.batch_size, 200)
    ]
    how = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 512}

    def generate(prompts: list[list[int]]) -> int:
        """Response tokens up to the first that ends one."""
        batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        output = model.generate(**batch, do_sample=True, **how)[:, batch["input_ids"].shape[1] :]
        ended = (output < ENDS).int().cummax(dim=1).values
        return int((1 - ended).sum() + ended[:, -1].sum())

    for turn in range(args.epochs):
        if args.arm == "sampler":
            sampled = LocalSampler(rows=args.batch_size).sample(
                policy, prompts, 4, Sampling(**how), turn
            )
            turns.tokens = sum(len(response.ids) for group in sampled for response in group)
        else:
            torch.manual_seed(turn)
            rows = [prompt for prompt in prompts for _ in range(4)]
            turns.tokens = sum(
                generate(rows[i : i + args.batch_size])
                for i in range(0, len(rows), args.batch_size)
            )
        turns.end(turn + 1)


def load(args: argparse.Namespace) -> None:
    """Check, map and plan trajectories, load the first micro-batches, and print CPU time and memory of no file."""
    from lightning.pytorch.trainer.states import TrainerFn

    took, start, clock = {}, resident("RssAnon"), time.process_time()

    def lap(name: str) -> None:
        nonlocal clock
        took[name], clock = time.process_time() - clock, time.process_time()

    data = trajectories(args, "*.parquet")
    data.trainer = SimpleNamespace(
        world_size=1, global_rank=0, local_rank=0, current_epoch=0, fast_dev_run=False,
        state=SimpleNamespace(fn=TrainerFn.FITTING),
    )  # fmt: skip
    lap("check_s")
    data.setup("fit")
    lap("setup_s")
    data.trainer.current_epoch = 1  # the first is planned by now
    loader = data.train_dataloader()
    lap("plan_s")
    sizes = [int((batch.real_B > 0).sum()) for batch in islice(loader, 400)]
    lap("load_s")
    took |= {"trajectories": len(data.reward), "loaded": sum(sizes), "microbatches": len(sizes)}
    print(json.dumps(took | {"memory": resident("RssAnon") - start}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arms = {"ours": ours, "compiled": ours, "sampler": sample, "generate": sample, "load": load}
    parser.add_argument("arm", choices=arms)
    parser.add_argument("folder", type=Path, help="made by benchmark.py")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="trajectories of an update; rows of a sampler"
    )
    parser.add_argument("--microbatch-tokens", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    arms[args.arm](args)


if __name__ == "__main__":
    main()
