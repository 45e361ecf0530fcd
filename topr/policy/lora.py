"""Low-rank adapters (Hu et al., arXiv:2106.09685), trained instead of the weights."""

from dataclasses import dataclass
from pathlib import Path

from jsonargparse.typing import PositiveInt
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer

from topr.io import explained
from topr.policy.model import Policy, load_policy


@dataclass
class LoRA:
    """Settings of the adapters.

    Args:
        rank: of each adapter.
        alpha: an adapter is scaled by alpha / rank.
        targets: names of the layers that get one; by default all linear ones but the output
            projection.
    """

    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    targets: str | list[str] = "all-linear"

    def add_to(self, policy: Policy) -> None:
        """Add fresh adapters, which change nothing yet, and freeze the policy's own weights."""
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=self.targets,
            lora_dropout=0.0,  # log mu and log pi must come from one deterministic function
        )
        with explained(f"model.lora.targets: {self.targets!r} fits no layer", ValueError):
            policy.model.add_adapter(config)
        for layer in policy.model.modules():
            if not isinstance(layer, LoraLayer):
                continue
            # next to weights on the meta device, adapters are there as well
            for name in layer.adapter_layer_names:
                getattr(layer, name).to_empty(device="cpu")
            layer.reset_lora_parameters("default", init_lora_weights=True)


def merge_adapter(name: str, adapter: Path) -> Policy:
    """A stored policy with a saved adapter merged into its weights, on the CPU."""
    policy = load_policy(name)
    policy.model = PeftModel.from_pretrained(policy.model, str(adapter)).merge_and_unload()
    return policy
