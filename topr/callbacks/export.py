"""Export: the policy as a Hugging Face folder, with its figures before and after training."""

import json
from pathlib import Path

from jinja2 import Template
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

from topr.evaluation import live
from topr.evaluation.report import UNITS, table
from topr.io import write_text
from topr.io.settings import plain
from topr.module import PolicyModule
from topr.policy.lora import merge_adapter
from topr.policy.model import export_policy, load_policy
from topr.policy.sharding import full_state_dict

CARD = Template(Path(__file__).with_name("card.md.jinja").read_text())


class ExportPolicy(Callback):
    """Measures the policy on data.test before and after `fit`, writes policy/ and summary.json to
    the run's folder. A trial run (fast_dev_run) measures, and writes nothing.

    Args:
        bfloat16: round the weights of policy/, which is then another policy than the one measured.
    """

    def __init__(self, bfloat16: bool = False):
        self.bfloat16 = bfloat16
        self.measured: dict = {}  # before and after; empty without data.test

    def state_dict(self):
        return self.measured

    def load_state_dict(self, state_dict):
        self.measured = state_dict

    def measure(self, when: str, trainer, module: PolicyModule):
        data = trainer.datamodule
        if data and data.test:
            rank_zero_info("measuring the policy on data.test")
            batch = data.problem_batch("test")
            self.measured[when] = live.metrics_of_all_ranks(
                batch, live.sample_and_grade(module, batch)
            )

    def on_train_start(self, trainer, pl_module):
        if "before" not in self.measured:
            self.measure("before", trainer, pl_module)

    def on_train_end(self, trainer, pl_module):
        self.measure("after", trainer, pl_module)
        if self.measured:
            rank_zero_info("\n" + table(self.measured))
            after = {f"test/{key}": value["mean"] for key, value in self.measured["after"].items()}
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):  # beside the hyperparameters
                    logger.log_hyperparams(logger.hparams, after, trainer.global_step)
                else:
                    logger.log_metrics(after, trainer.global_step)
        weights = full_state_dict(pl_module.policy)  # of all ranks
        folder = Path(trainer.log_dir or ".")  # rank 0 tells the others
        if trainer.fast_dev_run or not trainer.is_global_zero:
            return
        path = folder / "policy"
        if pl_module.lora:
            export_policy(pl_module.policy, folder / "adapter", weights)
            export_policy(merge_adapter(pl_module.policy.name, folder / "adapter"), path)
        else:
            export_policy(pl_module.policy, path, weights)
        if self.bfloat16:
            export_policy(load_policy(str(path)).bfloat16(), path)
        write_text(path / "README.md", self.model_card(pl_module))
        write_text(
            folder / "summary.json", json.dumps(self.summary(trainer, pl_module), indent=2) + "\n"
        )
        print(f"policy/ and summary.json are in {folder}")

    def model_card(self, module: PolicyModule) -> str:
        """README.md of policy/: its loss, its figures, and hashes of all that decided them."""
        return CARD.render(
            policy=module.policy_name,
            updates=module.global_step,
            figures=f"{table(self.measured)}\n{UNITS}\n\n" if self.measured else "",
            settings={"loss": plain(module.loss)} | module.decisive,
        )

    def summary(self, trainer, module: PolicyModule) -> dict:
        """The contents of summary.json."""
        data = trainer.datamodule
        summary: dict = {}
        for when, row in self.measured.items():
            summary[when] = {name: value["mean"] for name, value in row.items()} | {
                "problems": len(data.job("test").problems),
                "samples": data.samples,
            }
        summary["steps"] = trainer.global_step
        if data:
            summary["trajectories"] = len(data.data.reward)
        summary["max_abs_log_ratio_at_start"] = module.max_abs_log_ratio
        return summary
