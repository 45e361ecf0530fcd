"""What only a GPU can show: `python tests/gpu.py` writes gpu.json and gpu.md, in at most 8 minutes, without network.

Each part is a process with a time limit of its own; what it has recorded stays when it fails or is stopped. `--small`
tries every part with tiny models, without a GPU too; its figures mean nothing.
"""

import argparse
import gc
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

ROOT = Path(__file__).parent.parent
TIME = 480  # seconds for all parts
Record = Callable[..., None]  # one row of a part's table


@dataclass
class Setting:
    """What a part is given."""

    folder: Path  # of policies, shared by the parts
    small: bool
    record: Record

    def __post_init__(self):
        import torch

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def policy(self, name: str) -> Path:
        """A random Llama in bfloat16, made on the device."""
        import torch
        from memory import SHAPES, config
        from topr.reproduce.making import make_tokenizer
        from transformers import LlamaForCausalLM

        from topr.policy import Policy, export_policy

        folder = self.folder / name
        if folder.exists():
            return folder
        with torch.device("meta"):
            model = LlamaForCausalLM(
                config(*((64, 2, 512, 128, 4, 2, True) if self.small else SHAPES[name]))
            )
        model.to(torch.bfloat16).to_empty(device=self.device)
        model.tie_weights()  # `to_empty` unties them
        torch.manual_seed(0)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(0, 0.02) if weight.dim() > 1 else weight.fill_(1)
        export_policy(Policy(model, make_tokenizer(), name), folder)
        return folder


def tests(setting: Setting) -> None:
    """The tests that are marked `gpu`; without one they are skipped."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "--timeout", "120"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    counts |= {
        name: int(count)
        for count, name in re.findall(r"(\d+) (passed|failed|skipped)", done.stdout)
    }
    setting.record(**counts)
    if done.returncode:
        raise SystemExit(
            "\n".join(re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.M)) or done.stdout[-500:]
        )


def attention(setting: Setting) -> None:
    """Attention over a row in which responses share prompts, against float64 with a mask over all pairs of tokens. An
    error is relative to the largest value. `torch` is its own attention in the same precision, with that mask."""
    import torch
    import torch.nn.functional as F

    from topr.batching import pack
    from topr.policy.shared_prompts import Spans, attend

    rng, dtype = (
        np.random.default_rng(0),
        torch.bfloat16 if setting.device.type == "cuda" else torch.float32,
    )
    scale, width = (1, 16) if setting.small else (20, 128)
    prompts = [np.arange(10 * scale)] * 4 + [np.arange(7 * scale)] + [np.arange(3 * scale)] * 3
    tokens = pack(
        prompts, [np.arange(n) for n in rng.integers(2 * scale, 20 * scale, len(prompts))]
    )
    length = len(tokens.input_ids_L)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = torch.zeros(length, length, dtype=torch.bool)
    for start, end, first, last in tokens.spans:
        seen[start:end, first:last] = True
        seen[start:end, start:end] = distance[start:end, start:end] >= 0
    position = tokens.position_ids_L  # in a row, a response does not stand behind its prompt
    for heads, groups, window in [(32, 32, None), (32, 8, None), (32, 8, 8 * scale), (8, 1, None)]:
        mask = seen if window is None else seen & (position[:, None] - position < window)
        torch.manual_seed(0)
        given = [
            torch.randn(1, n, length, width, device=setting.device) for n in (heads, groups, groups)
        ]
        upward = torch.randn(1, heads, length, width, device=setting.device)

        def run(
            kind: torch.dtype, ours: bool, given=given, upward=upward, mask=mask, window=window
        ) -> list:
            inputs = [tensor.to(kind).requires_grad_() for tensor in given]
            if ours:
                out = attend(None, *inputs, None, sliding_window=window, spans=Spans(tokens.spans))[
                    0
                ].transpose(1, 2)
            else:
                out = F.scaled_dot_product_attention(
                    *inputs, attn_mask=mask.to(setting.device), enable_gqa=True
                )
            return [out.detach(), *torch.autograd.grad(out, inputs, upward.to(kind))]

        exact, ours, torchs = run(torch.float64, False), run(dtype, True), run(dtype, False)
        errors = [
            [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(x, exact)]
            for x in (ours, torchs)
        ]
        names = ("value", "d query", "d key", "d value")
        row = {
            f"error of {name}": f"{a:.1e} (torch {b:.1e})"
            for name, a, b in zip(names, *errors, strict=True)
        }
        setting.record(heads=heads, key_heads=groups, window=window, tokens=length, **row)
        if any(a > 2 * b + 1e-5 for a, b in zip(*errors, strict=True)):
            raise SystemExit("an error is more than twice that of torch")


def train(
    setting: Setting,
    name: str = "1B",
    *,
    padded: bool = False,
    compiled: bool = False,
    sharded: bool = False,
) -> None:
    """Training on random trajectories, 8 to a prompt: the median of all updates but the first two, in bf16-mixed."""
    import torch
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from topr.callbacks.monitor import estimate_training

    from topr.datamodule import TrajectoryDataModule
    from topr.losses import TOPR
    from topr.module import PolicyModule
    from topr.optim import Adafactor
    from topr.policy import LoRA, shared_prompts
    from topr.tasks import Arithmetic
    from topr.trajectories import Trajectory, write_trajectories

    rng, length = np.random.default_rng(0), 4 if setting.small else 200
    vocabulary, batch_size, updates = (
        (500, 16, 4) if setting.small else (128000, 32 if name == "8B" else 64, 7)
    )
    large = name == "8B"
    gigabytes = (
        torch.cuda.get_device_properties(0).total_memory / 1e9
        if setting.device.type == "cuda"
        else 0
    )
    lora = LoRA() if large and gigabytes < 130 else None
    if padded:
        shared_prompts.enable_if_exact = lambda *_: None
    policy, rows = setting.policy(name), []
    for i in range(batch_size * updates):
        if i % 8 == 0:
            prompt = rng.integers(0, vocabulary, rng.integers(length // 2, 2 * length)).tolist()
        response = rng.integers(0, vocabulary, rng.integers(length // 2, 3 * length)).tolist()
        sampled = ("prompt", prompt, "response", response, [-np.log(vocabulary)] * len(response))
        rows.append(
            Trajectory(str(i // 8), str(i // 8), *sampled, reward=(-1.0) ** i, finished=True)
        )
    file = setting.folder / f"{os.getpid()}.parquet"
    write_trajectories(file, rows, {})
    measured: list[dict[str, float]] = []

    class Measure(Callback):
        def on_train_start(self, trainer, module):
            self.estimate = estimate_training(trainer, module)

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step > len(measured):
                found = trainer.callback_metrics.items()
                measured.append(
                    {key: float(value) for key, value in found if key.startswith("speed/")}
                )

    measure = Measure()
    strategy = (
        ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1) if sharded else "auto"
    )
    optimizer: Any = Adafactor if large and lora is None else torch.optim.AdamW
    Trainer(
        accelerator="auto", devices=1, strategy=strategy, precision="bf16-mixed", max_epochs=1, log_every_n_steps=1,
        gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[measure],
    ).fit(
        PolicyModule(
            str(policy), Arithmetic(), TOPR(), partial(optimizer, lr=1e-6), lora=lora, compile=compiled,
            activation_checkpointing=large,
        ),
        TrajectoryDataModule(
            str(policy), TOPR(), Arithmetic(), str(file), batch_size=batch_size, whole_groups=True,
            microbatch_tokens=500 if setting.small else 8192 if large else 16384,
        ),
    )  # fmt: skip
    speeds = [
        [step[f"speed/{key}"] for step in measured[2:]] for key in ("tokens_per_s", "utilisation")
    ]
    peak, expected = (
        max(step["speed/peak_memory_gb"] for step in measured),
        measure.estimate["fit"] / 1e9,
    )
    row = {
        "model": name,
        "trained": "adapters" if lora else "all weights",
        "updates": len(measured),
    }
    row |= {
        "tokens/s": round(statistics.median(speeds[0])),
        "utilisation": round(statistics.median(speeds[1]), 3),
    }
    row |= {
        "peak GB": round(peak, 2),
        "estimated GB": round(expected, 2),
        "ratio": round(expected / peak, 3),
    }
    setting.record(**row)


def sample(setting: Setting) -> None:
    """Sampling with the 1B model: ours in bf16-mixed, transformers' `generate` and continuous batching with weights in
    bfloat16. Each token ends a response with probability 1/64; at most 256 tokens. `generate` computes one batch."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    from topr.policy import load_policy
    from topr.policy.model import own_device
    from topr.sampling import LocalSampler, Sampling

    with own_device():
        policy = load_policy(str(setting.policy("1B"))).eval()
    model = (
        AutoModelForCausalLM.from_pretrained(setting.policy("1B"), dtype=torch.bfloat16)
        .to(setting.device)
        .eval()
    )
    vocabulary, most = model.config.vocab_size, 16 if setting.small else 256
    ends = list(range(vocabulary // (8 if setting.small else 64)))
    policy.model.generation_config.eos_token_id = model.generation_config.eos_token_id = ends
    rng = np.random.default_rng(0)
    prompts = [rng.integers(len(ends), vocabulary, n).tolist() for n in rng.integers(50, 200, 512)]
    if setting.small:
        prompts = [prompt[:8] for prompt in prompts]
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": most}

    def generated(rows: int) -> tuple[int, int]:
        batch, width = prompts[:rows], max(map(len, prompts[:rows]))
        ids, mask = torch.zeros(2, rows, width, dtype=torch.long, device=setting.device)
        for i, prompt in enumerate(batch):
            ids[i, -len(prompt) :], mask[i, -len(prompt) :] = torch.tensor(prompt), 1
        output = model.generate(
            ids, attention_mask=mask, do_sample=True, pad_token_id=0, **options
        )[:, width:]
        ended = (output < len(ends)).int().cummax(dim=1).values
        return rows, int((1 - ended).sum() + ended[:, -1].sum())

    def sampled(rows: int) -> tuple[int, int]:
        found = LocalSampler(rows).sample(policy, prompts[:rows], 4, Sampling(**options), 0)
        return 4 * rows, sum(len(response.ids) for group in found for response in group)

    def continuous(rows: int) -> tuple[int, int]:
        config = GenerationConfig(do_sample=True, eos_token_id=ends, pad_token_id=0, **options)
        blocks = (
            ContinuousBatchingConfig(num_blocks=32) if setting.small else None
        )  # otherwise 90% of what is free
        found = model.generate_batch(
            [prompt for prompt in prompts[:rows] for _ in range(4)], config, blocks
        )
        return len(found), sum(len(output.generated_tokens) for output in found.values())

    for rows in (4, 8) if setting.small else (64, 256, 512):
        engines = {"ours": sampled, "generate": generated}
        if rows != 64:
            engines["continuous batching"] = continuous
        for name, engine in engines.items():
            gc.collect()
            if setting.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                weights = torch.cuda.memory_allocated()
            began = time.perf_counter()
            try:
                with (
                    torch.no_grad(),
                    torch.autocast(setting.device.type, torch.bfloat16, enabled=name == "ours"),
                ):
                    responses, tokens = engine(rows)
            except Exception as error:  # a peer's fault must not hide our figures
                setting.record(
                    engine=name, rows=rows, error=f"{type(error).__name__}: {error}"[:100]
                )
                if name == "ours":
                    raise
                continue
            seconds = time.perf_counter() - began
            row = {"engine": name, "rows": rows, "responses": responses, "tokens": tokens}
            row |= {"seconds": round(seconds, 1), "tokens/s": round(tokens / seconds)}
            if setting.device.type == "cuda":
                row["GB beside weights"] = round(
                    (torch.cuda.max_memory_allocated() - weights) / 1e9, 1
                )
            setting.record(**row)


PARTS: dict[str, tuple[Callable[[Setting], None], int, str]] = {  # seconds at most, title
    "tests": (tests, 100, "Tests"),
    "attention": (attention, 60, "Attention over shared prompts"),
    "1B": (train, 75, "Training 1B, prompts shared"),
    "sample": (sample, 150, "Sampling"),
    "8B": (partial(train, name="8B"), 150, "Training 8B"),
    "padded": (partial(train, padded=True), 75, "Training 1B, padded rows"),
    "compiled": (partial(train, compiled=True), 100, "Training 1B, compiled"),
    "sharded": (partial(train, sharded=True), 75, "Training 1B, FSDP2 with one rank"),
}


def run_part(name: str, folder: Path, small: bool, limit: float) -> dict[str, Any]:
    """Outcome, seconds and recorded rows of a part."""
    rows, began = folder / f"{name}.jsonl", time.perf_counter()
    rows.touch()
    command = [sys.executable, __file__, "--part", name, "--folder", folder] + ["--small"] * small
    with (folder / f"{name}.log").open("w+") as log:
        # a session of its own, so that the time limit ends what it has started as well
        process = subprocess.Popen(
            [*map(str, command)], stdout=log, stderr=log, start_new_session=True
        )
        try:
            code, outcome = process.wait(limit), "ran"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code, outcome = process.wait(), f"stopped after {limit:.0f} s"
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()]
    if code > 0:
        outcome = f"failed: {lines[-1] if lines else f'exit code {code}'}"
    done = {"outcome": outcome, "seconds": round(time.perf_counter() - began, 1)}
    return done | {
        "rows": [json.loads(line) for line in rows.read_text().splitlines()],
        "log": lines[-40:],
    }


def report(about: dict[str, str], parts: dict[str, dict[str, Any]]) -> str:
    """gpu.md."""
    versions = ", ".join(
        f"{key} {about[key]}" for key in ("torch", "lightning", "transformers", "python")
    )
    text = f"# {about['device']}\n\n`{about['command']}`, commit {about['commit']}, {about['date']}; {versions}.\n"
    for name, part in parts.items():
        function, _, title = PARTS[name]
        what = getattr(function, "func", function).__doc__ or ""
        text += f"\n## {title}\n{' '.join(what.split())} Took {part['seconds']} s.\n"
        if part["outcome"] != "ran":
            text += f"\n**This part {part['outcome']}.**\n"
        if columns := list(dict.fromkeys(key for row in part["rows"] for key in row)):
            lines = [columns, ["---"] * len(columns)]
            lines += [
                ["–" if row.get(key) is None else row[key] for key in columns]
                for row in part["rows"]
            ]
            text += "\n" + "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny models, without a GPU too")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of gpu.json and gpu.md")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        with (args.folder / f"{args.part}.jsonl").open("a", buffering=1) as rows:
            setting = Setting(
                args.folder, args.small, lambda **row: print(json.dumps(row), file=rows)
            )
            return PARTS[args.part][0](setting)

    import lightning
    import torch
    import transformers

    if not args.small and not torch.cuda.is_available():
        raise SystemExit("no GPU; --small tries every part without one")
    commit = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    about = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})",
        "command": "python tests/gpu.py" + " --small" * args.small, "commit": commit.stdout.strip() or "unknown",
        "date": date.today().isoformat(), "torch": torch.__version__, "lightning": lightning.__version__,
        "transformers": transformers.__version__, "python": platform.python_version(),
    }  # fmt: skip
    parts: dict[str, dict[str, Any]] = {}
    end = time.perf_counter() + TIME
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, (_, limit, title) in PARTS.items():
            left = end - time.perf_counter()
            if left < 5:
                parts[name] = {"outcome": "had no time left", "seconds": 0, "rows": [], "log": []}
            else:
                parts[name] = run_part(name, Path(folder), args.small, min(limit, left))
            print(f"{title}: {parts[name]['outcome']}, {parts[name]['seconds']} s", flush=True)
            (args.out / "gpu.json").write_text(
                json.dumps(about | {"parts": parts}, indent=1) + "\n"
            )
            (args.out / "gpu.md").write_text(report(about, parts))
    sys.exit(any(part["outcome"] != "ran" for part in parts.values()))


if __name__ == "__main__":
    main()
