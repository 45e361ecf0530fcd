"""Commands of train.py, one behind the other, in processes that torchrun starts: they pay for the imports once.

torchrun --nproc-per-node 2 tests/ranks.py FILE, which holds a list of {"folder": …, "arguments": […]}.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import train


def main() -> None:
    for number, command in enumerate(json.loads(Path(sys.argv[1]).read_text())):
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
