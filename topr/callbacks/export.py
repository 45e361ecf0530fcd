"""Export of the trained policy with summary.json: figures on the test problems before and after training."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from topr.callbacks.evaluate import Evaluate
from topr.callbacks.monitor import Monitor
from topr.io import write_text
from topr.policy import export_policy
from topr.policy.model import merge_adapter
from topr.policy.sharding import full_state_dict


class ExportPolicy(Callback):
    """Measures the policy on data.test before and after `fit`, writes policy/ and summary.json to the run's folder."""

    def __init__(self):
        self.before: dict[str, float] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before = state["before"]

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if self.before is None:
            self.before = self._measure(trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        data, monitor = trainer.datamodule, find(trainer, Monitor)
        summary = {"max_abs_log_ratio_at_start": monitor.max_abs_log_ratio}
        summary |= {"before": self.before, "after": self._measure(trainer)} if data.test is not None else {}
        summary |= {"steps": trainer.global_step, "trajectories": len(data.reward)}
        tokens, seconds = monitor.speed.total
        summary |= {"tokens_per_s": trainer.world_size * tokens / max(seconds, 1e-9), **data.shares()}
        if not trainer.fast_dev_run:
            folder = Path(trainer.log_dir)
            weights = full_state_dict(module.policy)
            if trainer.is_global_zero:
                if module.lora is None:
                    export_policy(module.policy, folder / "policy", weights)
                else:
                    export_policy(module.policy, folder / "adapter", weights)
                    export_policy(merge_adapter(module.policy.name, folder / "adapter"), folder / "policy")
                write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
            module.print(f"Policy and summary.json are in {folder}.")
        if "after" in summary:
            names = [name for name in summary["after"] if name not in ("problems", "samples")]
            module.print("test      " + "".join(f"{name:>10}" for name in names))
            for when in ("before", "after"):
                module.print(f"{when:10}" + "".join(f"{summary[when][name]:>10.3f}" for name in names))

    def _measure(self, trainer: Any) -> dict[str, float] | None:
        """Means of the metrics over the test problems, if there are any."""
        data = trainer.datamodule
        if data.test is None:
            return None
        figures = find(trainer, Evaluate).measure(trainer, "test", data.own_problems("test"))
        means = {name.removeprefix("test/"): value for name, value in figures.items() if name.startswith("test/")}
        return means | {"problems": len(data.read_problems("test")), "samples": int(data.samples)}


def find(trainer: Any, kind: type) -> Any:
    """The trainer's callback of this class."""
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))
