"""Our arms of `benchmark.py`, one of them a process: training, sampling, the data path."""

import argparse
import json
import os
import sys
import time
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

ENDS = 5  # of the 512 tokens, near enough equally likely, end a sampled response


class Turns:
    """An arm's epochs: at the end of each it tells what the epoch took and waits for its turn.

    An epoch lasts from the end of the one before, so all that happens between updates is in it.
    Memory is the peak of the resident set above that after the imports: weights, gradients,
    optimiser state, any reference model, activations.
    """

    def __init__(self):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self.base = resident("VmRSS")
        self.tokens = 0
        self.steps = 0
        self.begin()

    def begin(self) -> None:
        self.wall = time.perf_counter()
        self.cpu = time.process_time()

    def end(self, steps: int) -> None:
        """An epoch is over, after `steps` updates in all."""
        took = {
            "cpu": time.process_time() - self.cpu,
            "wall": time.perf_counter() - self.wall,
            "tokens": self.tokens,
            "steps": steps - self.steps,
            "memory": resident("VmHWM") - self.base,
        }
        print("took " + json.dumps(took), flush=True)
        self.tokens = 0
        self.steps = steps
        if not sys.stdin.readline():
            raise SystemExit
        self.begin()


def resident(name: str) -> int:
    """Bytes of this process: VmRSS, VmHWM (the peak) or RssAnon (what belongs to no file)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise ValueError(name)


def lengths(rng: np.random.Generator, mean: float, count: int, most: int) -> np.ndarray:
    """Log-normal with a deviation of half the mean, cut off at 4 and `most`."""
    drawn = rng.lognormal(np.log(mean) - 0.223 / 2, 0.223**0.5, count)
    return np.clip(drawn.round().astype(int), 4, most)


def trajectories(args: argparse.Namespace):
    """The project's data module. Batches keep the four responses to a prompt together, as those
    of the peers do."""
    from topr.datamodule import TrajectoryDataModule
    from topr.tasks import Arithmetic

    return TrajectoryDataModule(
        str(args.folder / "policy"),
        Arithmetic(),
        train=str(args.folder / "*.parquet"),
        whole_groups=True,
        batch_size=args.batch_size,
        microbatch_tokens=args.microbatch_tokens,
    )


def ours(args: argparse.Namespace) -> None:
    """Train by the project's own trainer, module and data module, as `train.py fit` does."""
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    # some are loaded later otherwise, as the peers' are loaded before their turns begin
    import datasets  # noqa: F401
    import pyarrow.parquet
    import torch
    import torch.utils.tensorboard
    import transformers.models.llama.modeling_llama  # noqa: F401
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.loggers import TensorBoardLogger

    from topr.losses import TOPR
    from topr.module import PolicyModule
    from topr.tasks import Arithmetic

    pyarrow.parquet.read_table(args.folder / "train.parquet")  # or its code is loaded later
    turns = Turns()

    class Epochs(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            turns.tokens += sum(part.tokens.nominal for part in batch.micro_batches)

        def on_train_epoch_end(self, trainer, pl_module):
            turns.end(trainer.global_step)

    def optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=1e-5, fused=True)  # fused: the peers' default

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=args.epochs,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=TensorBoardLogger(args.folder / "runs"),
        callbacks=[Epochs()],
        precision=args.precision,
    )
    policy = str(args.folder / "policy")
    module = PolicyModule(policy, Arithmetic(), TOPR(), optimizer, threads=1)
    trainer.fit(module, trajectories(args))


def by_hand(args: argparse.Namespace) -> None:
    """Train by the plain loop of by_hand.py."""
    import by_hand

    by_hand.train(args)


def sample(args: argparse.Namespace) -> None:
    """Sample 4 responses to each prompt a turn: `sampler` by the project's own, `generate` by
    transformers alone. There are as many prompts as rows, so four times as many responses as fit
    side by side."""
    import torch

    from topr.policy import load_policy
    from topr.sampling import LocalSampler, Sampling, ServerSampler

    torch.set_num_threads(1)
    turns = Turns()
    rows = args.batch_size
    policy = load_policy(str(args.folder / "policy")).eval()
    stored = args.folder / "prompts.json"
    if stored.exists():  # of a real policy, which ends its responses itself
        prompts = json.loads(stored.read_text())
    else:
        policy.model.generation_config.eos_token_id = list(range(ENDS))
        rng = np.random.default_rng(0)
        prompts = [rng.integers(ENDS, 512, n).tolist() for n in lengths(rng, 100, rows, 200)]
    how = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": args.max_new_tokens}
    sampler = ServerSampler(args.url) if args.arm == "server" else LocalSampler(rows)
    every = [prompt for prompt in prompts for _ in range(4)]
    mixed = args.precision == "bf16-mixed"
    for turn in range(args.epochs):
        torch.manual_seed(turn)
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            if args.arm == "generate":
                for start in range(0, len(every), rows):
                    turns.tokens += generate(policy, every[start : start + rows], how)
            else:
                for group in sampler.sample(policy, prompts, 4, Sampling(**how), turn):
                    turns.tokens += sum(len(response.ids) for response in group)
        turns.end(turn + 1)


def generate(policy, prompts: list[list[int]], how: dict) -> int:
    """Response tokens, up to the first that ends each."""
    import torch

    batch = policy.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    output = policy.model.generate(**batch, do_sample=True, **how)
    responses = output[:, batch["input_ids"].shape[1] :]
    ends = torch.tensor(sorted(policy.end_tokens))
    ended = torch.isin(responses, ends).int().cummax(dim=1).values
    return int((1 - ended).sum() + ended[:, -1].sum())


def load(args: argparse.Namespace) -> None:
    """Check, map and plan trajectories, load the first updates, and print CPU time and memory of
    no file."""
    data = trajectories(args)
    start = resident("RssAnon")
    took = {}

    def timed(name: str, function, *arguments):
        clock = time.process_time()
        result = function(*arguments)
        took[name] = time.process_time() - clock
        return result

    timed("setup_s", data.setup, "fit")
    timed("plan_s", data.plan, 1)  # the first is planned by now
    loader = data.train_dataloader()
    updates = timed("load_s", list, islice(loader, 100))
    took["trajectories"] = len(data.data.reward)
    took["loaded"] = sum(update.trajectories for update in updates)
    took["microbatches"] = sum(len(update.micro_batches) for update in updates)
    print(json.dumps(took | {"memory": resident("RssAnon") - start}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arms = {"ours": ours, "by hand": by_hand, "load": load}
    arms |= dict.fromkeys(["sampler", "generate", "server"], sample)
    parser.add_argument("arm", choices=arms)
    parser.add_argument("folder", type=Path, help="made by benchmark.py")
    what = "trajectories of an update; rows of a sampler"
    parser.add_argument("--batch-size", type=int, default=64, help=what)
    parser.add_argument("--microbatch-tokens", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--url", help="of the server")
    args = parser.parse_args()
    arms[args.arm](args)


if __name__ == "__main__":
    main()
