"""Low-rank adapters (Hu et al., arXiv:2106.09685), trained instead of the weights."""

from pathlib import Path

from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer

from topr.io import InputError, explained
from topr.policy.model import LoRA, Policy, load_policy


def add_adapters(policy: Policy, lora: LoRA):
    """Add fresh adapters, which change nothing yet, and freeze the policy's own weights."""
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets,
        lora_dropout=0.0,  # log mu and log pi must come from one deterministic function
    )
    with explained(f"model.lora.targets: {lora.targets!r} fits no layer", ValueError):
        policy.model.add_adapter(config)
    for layer in policy.model.modules():
        if not isinstance(layer, LoraLayer):
            continue
        if layer.weight is policy.model.get_output_embeddings().weight:
            # log-probs are computed from the weight alone, without adapters
            raise InputError(
                "model.lora.targets names the output projection or embeddings tied to it"
            )
        # next to weights on the meta device, adapters are there as well
        for name in layer.adapter_layer_names:
            getattr(layer, name).to_empty(device="cpu")
        layer.reset_lora_parameters("default", init_lora_weights=True)


def merge_adapter(name: str, adapter: Path) -> Policy:
    """A stored policy with a saved adapter merged into its weights, on the CPU."""
    policy = load_policy(name)
    policy.model = PeftModel.from_pretrained(policy.model, str(adapter)).merge_and_unload()
    return policy
