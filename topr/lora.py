"""Low-rank adapters: trained in place of a policy's weights, merged into them in the end."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from topr.io import InputError, check_counts, first_line
from topr.policy import load_policy


@dataclass
class LoRA:
    """Low-rank adapters (Hu et al., arXiv:2106.09685) that are trained in place of the weights.

    Args:
        rank: of each adapter.
        alpha: an adapter is scaled by alpha / rank.
        targets: names of the layers that get one; all linear ones but the output projection by default.

    Raises:
        InputError: rank or alpha is below 1.
    """

    rank: int = 16
    alpha: int = 32
    targets: str | list[str] = "all-linear"

    def __post_init__(self):
        check_counts("model.lora.", rank=self.rank, alpha=self.alpha)

    def add_to(self, model: nn.Module) -> None:
        """Put fresh adapters, which change nothing yet, into a policy and freeze its own weights, in place.

        Raises:
            InputError: no layer has such a name.
        """
        from peft import LoraConfig
        from peft.tuners.lora import LoraLayer

        try:
            # without dropout: log mu and log pi must come from one deterministic function
            config = LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=self.targets, lora_dropout=0.0)
            model.add_adapter(config)
        except ValueError as error:
            raise InputError(f"model.lora.targets: {self.targets!r} fits no layer ({first_line(error)})") from error
        for layer in model.modules():
            if isinstance(layer, LoraLayer):  # beside weights yet to be loaded, adapters lie on the meta device as well
                for name in layer.adapter_layer_names:
                    getattr(layer, name).to_empty(device="cpu")
                layer.reset_lora_parameters("default", init_lora_weights=True)


def merge(policy: str, adapter: Path) -> nn.Module:
    """A policy with a saved adapter added to its weights, on the CPU."""
    from peft import PeftModel

    return PeftModel.from_pretrained(load_policy(policy), str(adapter)).merge_and_unload()
