"""Validation, test and predict: sample and grade responses. Export with the figures before and after training."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from shlex import join, quote
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from topr.callbacks.monitor import Monitor
from topr.distributed import Preempted, Progress, gather, stop_requested
from topr.evaluation import (
    BENCHMARKS,
    PerProblem,
    derived_seed,
    explain_out_of_memory,
    sample_and_grade,
    summarise,
)
from topr.evaluation.report import table
from topr.io import InputError, write_text
from topr.policy import export_policy
from topr.policy.model import merge_adapter
from topr.policy.sharding import full_state_dict, full_weights
from topr.sampling import LocalSampler, Sampler, ServerSampler
from topr.tasks import Problem
from topr.trajectories import Trajectory


class Evaluate(Callback):
    """Samples and grades for validation, test and predict; validates once before the first update as well."""

    validated: tuple[int, dict[str, float]] = (
        -1,
        {},
    )  # updates before the last validation, its figures

    def state_dict(self) -> dict[str, Any]:
        return {"validated": self.validated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.validated = tuple(state["validated"])

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 0 and trainer.limit_val_batches:  # without data.val it is 0
            self._write(trainer, flat("val", self.measure(trainer, "val")))
        elif self.validated[0] == trainer.global_step:
            self._write(
                trainer, self.validated[1]
            )  # TensorBoard has dropped this step's figures (purge_step)

    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        split, fitting = "test" if trainer.testing else "val", trainer.state.fn == "fit"
        figures = flat(split, self.measure(trainer, split))
        if trainer.sanity_checking:
            return
        for (
            key,
            value,
        ) in figures.items():  # for other callbacks, the progress bar and Lightning's table
            # the shortest digits of float32, since the table shows all; the same on all ranks
            short = torch.tensor(
                float(str(np.float32(value))), dtype=torch.float64, device=module.device
            )
            shown = key == "val/pass@1"
            module.log(key, short, prog_bar=shown, logger=not fitting, sync_dist=True, batch_size=1)
        if fitting:
            self._write(trainer, figures)

    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def _write(self, trainer: Any, figures: dict[str, float]) -> None:
        """Log figures at the number of updates made; Lightning would log them at that of the last update."""
        self.validated = trainer.global_step, figures
        trainer.callback_metrics.update(
            {name: torch.tensor(value) for name, value in figures.items()}
        )
        for logger in trainer.loggers:
            logger.log_metrics(figures, trainer.global_step)

    def measure(self, trainer: Any, split: str) -> dict[str, dict[str, Any]]:
        """Metrics over all ranks' problems, means with intervals. Raises Preempted if a rank was asked to stop."""
        data, module, ranks = trainer.datamodule, trainer.lightning_module, trainer.world_size
        # a server does not hold the weights that are being trained
        sampler = LocalSampler() if isinstance(module.sampler, ServerSampler) else module.sampler
        samples = (
            2 if trainer.fast_dev_run else data.val_samples if split == "val" else data.samples
        )
        count = len(data.read_problems(split))
        numbers = range(trainer.global_rank, count, ranks)
        problems = [
            data.read_problems(split)[i] for i in numbers
        ]  # perhaps none, but every rank takes part
        settings = {
            "n": samples,
            "sampling": data.sampling,
            "seed": derived_seed(data.seed, trainer.global_step),
        }
        progress = Progress({"val": "validation"}.get(split, split), samples * len(problems))
        with sampling_context(trainer, sampler, samples, problems), progress as sampler.progress:
            trajectories = sample_and_grade(
                sampler, module.policy, module.task, problems, **settings, numbers=numbers
            )
        if any(gather(stop_requested.is_set())):
            raise Preempted
        self._show(trainer, split, trajectories)
        metrics = PerProblem(samples).to(trainer.strategy.root_device)
        metrics.update(trajectories)
        # in the order of the file, however many ranks there are: the bootstrap draws by position
        order = np.argsort(np.concatenate([range(rank, count, ranks) for rank in range(ranks)]))
        return summarise({name: values[order] for name, values in metrics.compute().items()})

    def _show(self, trainer: Any, split: str, trajectories: list[Trajectory]) -> None:
        """Log a few responses as text in TensorBoard."""
        if trainer.is_global_zero and hasattr(
            getattr(trainer.logger, "experiment", None), "add_text"
        ):
            some = trajectories[:: max(1, len(trajectories) // 8)]
            text = "\n\n".join(f"{t.prompt}\n{t.response}\nreward {t.reward:+g}" for t in some)
            # indented it is a code block: Markdown would take a product for emphasis
            text = "".join(f"    {line}\n" for line in text.splitlines())
            trainer.logger.experiment.add_text(f"{split}/samples", text, trainer.global_step)

    def on_predict_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int, *_: Any
    ) -> None:
        """Sample, grade and score a batch of problems, and write them as one file of data.out."""
        data, (path, problems) = trainer.datamodule, batch
        if index == 0:
            count = sum(len(part) for _, part in trainer.predict_dataloaders)
            module.sampler.progress = Progress("sampling", data.samples * count)
        with sampling_context(
            trainer, module.sampler, data.samples, problems
        ):  # on every rank, also without problems
            if problems:
                data.sampling_job.sample_part(
                    path, problems, module.sampler, module.policy, data.microbatch_tokens
                )

    def on_predict_end(self, trainer: Any, module: Any) -> None:
        module.sampler.progress.close()
        folder = trainer.datamodule.output_folder(trainer.datamodule.out)
        gather(None)  # until every rank has written its files
        if not trainer.is_global_zero:
            return
        files = sorted(folder.glob("*.parquet"))
        if not files:
            raise InputError(
                "the sampler left out every response to data.problems; look at its warnings"
            )
        rows = pq.read_table(files, columns=["reward", "valid", "finished"]).to_pandas()
        invalid, truncated = (rows["valid"] == False).mean(), (~rows["finished"]).mean()  # noqa: E712
        shares = f"mean reward {rows['reward'].mean():.3g}, {invalid:.1%} invalid, {truncated:.1%} truncated"
        module.print(
            f"{len(rows)} trajectories{'' if trainer.fast_dev_run else f' are under {folder}'}: {shares}."
        )
        if invalid == 1:
            rank_zero_warn(
                "every response is invalid: check the prompt, data.sampling and the task's grade"
            )


class ExportPolicy(Callback):
    """Measures the policy on data.test before and after `fit`, writes policy/ and summary.json to the run's folder."""

    before: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before = state["before"]

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if self.before is None and trainer.datamodule.test is not None:
            rank_zero_info("measuring the policy on data.test before training")
            self.before = find(trainer, Evaluate).measure(trainer, "test")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        data, monitor = trainer.datamodule, find(trainer, Monitor)
        monitor.bar.close()
        summary: dict[str, Any] = {"max_abs_log_ratio_at_start": monitor.max_abs_log_ratio}
        measured = {}
        if data.test is not None:
            measured = {
                "before": self.before,
                "after": find(trainer, Evaluate).measure(trainer, "test"),
            }
            figures = {f"test/{name}": value["mean"] for name, value in measured["after"].items()}
            for logger in trainer.loggers:
                if (
                    isinstance(logger, TensorBoardLogger) and logger.hparams
                ):  # beside the hyperparameters
                    logger.log_hyperparams(logger.hparams, figures, trainer.global_step)
                else:
                    logger.log_metrics(figures, trainer.global_step)
            module.print("test      " + "".join(f"{name:>10}" for name in measured["after"]))
            for when, found in measured.items():
                module.print(
                    f"{when:10}" + "".join(f"{value['mean']:>10.3f}" for value in found.values())
                )
        count = {"problems": len(data.read_problems("test")), "samples": int(data.samples)}
        summary |= {
            when: {k: v["mean"] for k, v in found.items()} | count
            for when, found in measured.items()
        }
        summary |= {"steps": trainer.global_step, "trajectories": len(data.reward)}
        tokens, seconds = monitor.clock.tolist()
        summary |= {
            "tokens_per_s": trainer.world_size * tokens / max(seconds, 1e-9),
            **data.shares(),
        }
        folder = data.output_folder(trainer.log_dir)
        weights = full_state_dict(module.policy)
        if trainer.is_global_zero:
            if module.lora is None:
                export_policy(module.policy, folder / "policy", weights)
            else:
                export_policy(module.policy, folder / "adapter", weights)
                export_policy(
                    merge_adapter(module.policy.name, folder / "adapter"), folder / "policy"
                )
            write_text(
                folder / "policy" / "README.md", model_card(module, data, summary, measured, folder)
            )
            write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        if trainer.fast_dev_run:
            return
        module.print(f"Policy and summary.json are in {folder}. Next:")
        module.print(f"  tensorboard --logdir {quote(str(folder.parent))}")
        kind, settings = type(module.task), vars(module.task)
        names = [
            n
            for n, (task, *_) in BENCHMARKS.items()
            if type(task) is kind and vars(task) == settings
        ]
        names += (
            [] if settings else [f"{kind.__module__}.{kind.__name__}"]
        )  # which evaluate.py imports
        if names and data.test:
            options = [
                folder / "policy",
                "--benchmark",
                f"{names[0]}={data.test}",
                "--samples",
                data.samples,
            ]
            for name, value in vars(data.sampling).items():
                if value != getattr(module.task.sampling, name):  # which evaluate.py takes
                    options += [f"--{name}", *(value if isinstance(value, list) else [value])]
            module.print(f"  python evaluate.py --policy {join(map(str, options))}")


def model_card(
    module: Any, data: Any, summary: dict[str, Any], measured: dict[str, Any], folder: Path
) -> str:
    """README.md of an exported policy, in the format of the Hugging Face hub."""
    known = {"base_model": module.policy_name, "library_name": "transformers"}
    head = yaml.safe_dump(known | {"pipeline_tag": "text-generation", "tags": ["topr"]})
    about = f"{summary['steps']} updates on {summary['trajectories']} trajectories of {', '.join(data.files)}"
    text = f"---\n{head}---\n# {module.policy_name}, trained with {type(module.loss).__name__}\n\n{about}, "
    text += "with the code of Tapered Off-Policy REINFORCE ([arXiv:2503.14286](https://arxiv.org/abs/2503.14286)).\n\n"
    if measured:
        counts = "{problems} problems, {samples} samples each".format(**summary["after"])
        text += f"{table(measured)}\n{counts}; per cent (length: tokens), 95% bootstrap intervals over problems.\n\n"
    text += (
        ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "lightning"))
        + "\n"
    )
    config = folder / "config.yaml"
    return text + (f"\n```yaml\n{config.read_text()}```\n" if config.exists() else "")


def flat(split: str, metrics: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Means and intervals under the names of the logged figures."""
    figures = {f"{split}/{metric}": value["mean"] for metric, value in metrics.items()}
    for end, name in enumerate(("low", "high")):
        figures |= {
            f"{split}_interval/{metric}_{name}": value["interval"][end]
            for metric, value in metrics.items()
        }
    return figures


def find(trainer: Any, kind: type) -> Any:
    """The trainer's callback of this class."""
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))


@contextmanager
def sampling_context(
    trainer: Any, sampler: Sampler, samples: int, problems: list[Problem]
) -> Iterator[None]:
    """Full weights, in the precision of training, which not all of Lightning's hooks have. With bf16-mixed each weight
    is cast once: Lightning's own autocast would cast it again for every token. Explains how to save memory."""
    rows = f"model.sampler.init_args.rows, now {getattr(sampler, 'rows', None) or 'automatic'}"
    out_of_memory = explain_out_of_memory(
        f"{samples} responses to each of {len(problems)} problems", rows
    )
    policy, device = trainer.lightning_module.policy, trainer.strategy.root_device
    bfloat16 = trainer.precision == "bf16-mixed"
    autocast = torch.autocast(device.type, torch.bfloat16, bfloat16, cache_enabled=True)
    eager = torch.compiler.set_stance(
        "force_eager"
    )  # compiled layers would be compiled again for each length
    with (
        out_of_memory,
        eager,
        torch.inference_mode(False),
        torch.no_grad(),
        full_weights(policy),
        autocast,
    ):
        # autocast caches only copies of weights that require gradients, so those under adapters do for the moment
        frozen = [parameter for parameter in policy.parameters() if not parameter.requires_grad]
        policy.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
