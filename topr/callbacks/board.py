"""TensorBoard's extras: the layout of its first tab, histograms of log-ratios, some responses."""

from pathlib import Path
from textwrap import indent

import yaml
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger

RESPONSES = 8  # shown at each validation


class TensorBoardExtras(Callback):
    """Needs a TensorBoardLogger; without one it does nothing."""

    def boards(self, trainer):
        """TensorBoard's writers; those of ranks beside 0 write nothing."""
        return [log.experiment for log in trainer.loggers if isinstance(log, TensorBoardLogger)]

    def on_train_start(self, trainer, pl_module):
        layout = Path(__file__).with_name("board.yaml").read_text()
        for board in self.boards(trainer):
            board.add_custom_scalars(yaml.safe_load(layout))

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        """Histograms of h by sign."""
        every = trainer.log_every_n_steps
        if not every or trainer.global_step % every:
            return
        log_ratio = outputs["columns"]["log_ratio"]
        positive = outputs["columns"]["advantage"] >= 0
        signs = {"positives": log_ratio[positive], "negatives": log_ratio[~positive]}
        for board in self.boards(trainer):
            for sign, values in signs.items():
                if len(values):
                    board.add_histogram(f"log_ratio/{sign}", values, trainer.global_step - 1)

    def on_validation_batch_end(self, trainer, pl_module, outputs, *_):
        """Some responses with prompts and rewards, as a block of code: Markdown would take a
        product for emphasis."""
        text = ""
        for shown in outputs["trajectories"][:RESPONSES]:
            text += f"{shown.prompt}\n{shown.response}\nreward {shown.reward:+g}\n\n"
        text = indent(text, "    ", lambda line: True)
        for board in self.boards(trainer):
            board.add_text("val/samples", text, trainer.global_step)
