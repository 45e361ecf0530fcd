"""Commands of train.py, one behind the other, in processes that torchrun starts: they pay for the imports once.

torchrun --nproc-per-node 2 tests/ranks.py FILE, which holds a list of {"folder": …, "arguments": […], "sigterm": null}:
the update at which the first process gets a SIGTERM.
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
from topr.monitor import Monitor

collect = Monitor.collect


def main() -> None:
    sigterm = None

    def interrupted(self, *arguments) -> None:
        if self.module.global_step == sigterm and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        collect(self, *arguments)

    Monitor.collect = interrupted
    if largest := os.environ.get("LARGEST_SHARD"):  # bytes; what writes more finds the disk full
        save = dcp.save

        def limited(*arguments, **more) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest), resource.RLIM_INFINITY))
            try:
                save(*arguments, **more)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        dcp.save = limited
    for number, command in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        sigterm = command["sigterm"]
        os.chdir(command["folder"])
        sys.argv = ["train.py", *command["arguments"]]
        code = 0
        try:
            train.main()
        except SystemExit as end:
            code = end.code or 0
        Path(f"code-{number}-{os.environ['RANK']}").write_text(str(code))
        torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
