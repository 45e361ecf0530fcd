"""Commands of train.py, one after another in processes that torchrun started: the imports are paid for once.

torchrun --nproc-per-node 2 tests/ranks.py FILE, which holds a list of {"arguments": […]}. Optional keys:
sigterm: rank 0 gets a SIGTERM at this update;
largest_shard: bytes; a sharded checkpoint that writes more to one file finds the disk full.

Beside FILE, `code-N-RANK` and `output-N-RANK` hold the exit code and the output of command N.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed.checkpoint as dcp

import train
from topr.callbacks import Monitor

on_after_backward, save = Monitor.on_after_backward, dcp.save


def run(arguments: list, sigterm: int | None = None, largest_shard: int | None = None) -> int:
    """The exit code of one command."""

    def interrupted(self, trainer, module) -> None:
        if trainer.global_step == sigterm and trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGTERM)
        on_after_backward(self, trainer, module)

    def limited(*given, **more) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_shard, resource.RLIM_INFINITY))
        try:
            save(*given, **more)
        finally:
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )

    Monitor.on_after_backward, dcp.save = interrupted, limited if largest_shard else save
    sys.argv = ["train.py", *map(str, arguments)]
    try:
        train.main()
    except SystemExit as end:
        return end.code or 0
    return 0


def main() -> None:
    file, rank = Path(sys.argv[1]), os.environ["RANK"]
    for number, command in enumerate(json.loads(file.read_text())):
        output = os.open(file.with_name(f"output-{number}-{rank}"), os.O_WRONLY | os.O_CREAT)
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(output, descriptor)
        code = run(**command)
        sys.stdout.flush()
        file.with_name(f"code-{number}-{rank}").write_text(str(code))
        torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
