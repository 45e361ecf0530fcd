"""Commands of train.py, one after another in processes that torchrun started: the imports are paid
for once.

torchrun --nproc-per-node 2 tests/ranks.py FILE, which holds a list of {"arguments": […]}. Beside
FILE, `code-N-RANK` and `output-N-RANK` hold the exit code and the output of command N.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from lightning.pytorch import Callback
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import train


class Stop(Callback):
    """Sends SIGTERM to rank 0 in the update of this number."""

    def __init__(self, update: int):
        self.update = update

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step + 1 == self.update and trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGTERM)


class SmallDisk(Callback):
    """From the start of training to its error no file grows beyond a size."""

    def on_train_start(self, trainer, pl_module):
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, resource.RLIM_INFINITY))

    def on_exception(self, trainer, pl_module, exception):
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class CountReductions(Callback):
    """Prints how often DDP reduced gradients, in how many updates of how many micro-batches."""

    def __init__(self):
        self.counts = [0, 0, 0]

    def on_train_start(self, trainer, pl_module):
        trainer.strategy.model.register_comm_hook(None, self.reduce)

    def reduce(self, state, bucket):
        self.counts[0] += 1
        return allreduce_hook(state, bucket)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.counts[1] += 1
        self.counts[2] += len(batch.micro_batches)

    def on_train_end(self, trainer, pl_module):
        print("reductions, updates, micro-batches:", self.counts)


def run(arguments: list) -> int:
    """The exit code of one command."""
    sys.argv = ["train.py", *map(str, arguments)]
    try:
        train.main()
    except SystemExit as end:
        return end.code or 0
    return 0


def main() -> None:
    file = Path(sys.argv[1])
    rank = os.environ["RANK"]
    for number, command in enumerate(json.loads(file.read_text())):
        output = os.open(file.with_name(f"output-{number}-{rank}"), os.O_WRONLY | os.O_CREAT)
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(output, descriptor)
        code = run(**command)
        sys.stdout.flush()
        file.with_name(f"code-{number}-{rank}").write_text(str(code))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
