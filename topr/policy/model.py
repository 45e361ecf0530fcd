"""The policy: a Hugging Face causal language model, loaded from a folder or the hub, exported as a folder."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse.typing import PositiveInt
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from topr.batching import Tokens, pack
from topr.io import InputError, atomic, explained
from topr.policy.files import load_tokenizer, resolve_policy
from topr.policy import shared_prompts
from topr.policy.logprobs import padded_hidden_states, token_log_probs


class Policy(nn.Module):
    """A Hugging Face causal model whose forward gives log-probs of responses; its tokenizer, its folder or hub name."""

    reshard_layers: bool  # see `sharding.shard`
    reshard: Any  # a method that FSDP2 adds

    def __init__(self, model: Any, tokenizer: Any, name: str):
        super().__init__()
        self.model, self.tokenizer, self.name = model, tokenizer, name
        # cuDNN's attention plans anew for every shape, and returns wrong values on some GPUs (pytorch#193893)
        torch.backends.cuda.enable_cudnn_sdp(False)

    def log_probs(self, tokens: Tokens) -> Tensor:
        """log pi of each sampled token at temperature 1, [N], float32 (float64 for a float64 model)."""
        hidden_states = padded_hidden_states if self.padded else shared_prompts.hidden_states
        hidden_ND = hidden_states(self.model, tokens)
        return token_log_probs(self.model, hidden_ND, tokens.target_N)

    forward = log_probs  # FSDP2 gathers and releases weights around it

    def logits(self, input_ids_BL: Tensor) -> Tensor:
        """The model's own logits, [B, L, V]."""
        return self.model(input_ids_BL).logits

    @property
    def padded(self) -> bool:
        """Whether trajectories are padded and do not share prompts."""
        return self.model.config.get_text_config()._attn_implementation != shared_prompts.NAME

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def end_tokens(self) -> set[int]:
        """Ids that end a response: the tokenizer's EOS and those of the generation config (Llama 3 has two)."""
        ends = self.model.generation_config.eos_token_id
        return {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers."""
        names = self.model._no_split_modules or []  # `fully_shard` changes the class of a layer
        return [
            module
            for module in self.model.modules()
            if type(module).__name__.removeprefix("FSDP") in names
        ]


def load_policy(name: str) -> Policy:
    """A policy with float32 weights and dropout off, on the default device; raises InputError if it has none."""
    disable_progress_bar()
    tokenizer = load_tokenizer(name)
    options = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
    load: Any = AutoModelForCausalLM.from_pretrained
    with explained(f"policy {name!r} cannot be loaded as a causal model"):
        model, loading = load(
            resolve_policy(name), config=_config(name), dtype=torch.float32, **options
        )
    if missing := sorted(loading["missing_keys"]):  # they would be random numbers
        raise InputError(
            f"policy {name!r} lacks the weights {', '.join(missing[:3])}; export or download it again"
        )
    if unknown := sorted(loading["unexpected_keys"]):
        found = ", ".join(unknown[:3])
        warnings.warn(
            f"policy {name!r}: the weights {found} have no place in its model and are left out",
            stacklevel=2,
        )
    policy = Policy(model, tokenizer, name)
    check_weights(policy)
    check_forward(policy)
    return policy


def own_device() -> torch.device:
    """This process's GPU, or the CPU; inside `with own_device():` a policy is loaded straight to it."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def empty_policy(name: str) -> Policy:
    """A policy without its weights: parameters on the meta device, float32; buffers are initialised."""
    from accelerate import init_empty_weights

    folder, tokenizer = resolve_policy(name), load_tokenizer(name)
    with explained(f"policy {name!r} cannot be loaded as a causal model"):
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(
                _config(name), dtype=torch.float32, trust_remote_code=False
            )
        model.tie_weights()  # `init_empty_weights` unties them
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    return Policy(model, tokenizer, name)


def _config(name: str) -> Any:
    """A model's configuration with dropout and other noise off."""
    config = AutoConfig.from_pretrained(resolve_policy(name), trust_remote_code=False)
    # log mu and log pi must come from one deterministic function, whatever mode the trainer sets
    for key, value in vars(config).items():
        if ("drop" in key or "jitter" in key) and isinstance(value, (int, float)):
            setattr(config, key, 0.0)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("it is quantised; take the weights that it was made from")
    if config.model_type == "phimoe":
        raise ValueError("its router draws experts at random in training; choose another model")
    return config


def check_weights(policy: Policy) -> None:
    """Raise an InputError for weights (of this rank's shard) that are not finite."""
    for name, weight in policy.model.named_parameters():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if not local.sum().isfinite():
            message = f"policy {policy.name!r}: the weights {name} hold NaN or infinity"
            raise InputError(f"{message}; export or download it again")


@torch.no_grad()
def check_forward(policy: Policy, bound: float = 1e-3) -> None:
    """Share prompts if the model allows it; raise InputError if the model's own log-probs differ by `bound`."""
    model = policy.model
    ids = np.arange(6) % model.config.get_text_config().vocab_size
    tokens = pack([ids[:3]], [ids[3:]]).to(policy.device)
    own_CV = policy.logits(tokens.input_ids_L[None, :5])[0, 2:5].float().log_softmax(-1)
    log_probs_N = policy.log_probs(tokens)
    difference = (own_CV.gather(1, tokens.target_N[:, None])[:, 0] - log_probs_N).abs().max().item()
    if not difference < bound:
        message = f"policy {policy.name!r} does more to its logits than a projection and a soft cap (a scaled head?)"
        raise InputError(f"{message}: log-probs differ by {difference:.1e}; choose another model")
    shared_prompts.enable_if_exact(policy, bound)


def compile_layers(policy: Policy) -> None:
    """Compile the norms, MLPs and attention projections of the decoder layers, in place; call it after loading."""
    if not policy.layers:
        raise InputError(
            f"model.compile finds no decoder layers in a {type(policy.model).__name__}; leave it false"
        )
    what = "model.compile needs a C++ compiler, and on a GPU Triton as well"
    with explained(what, remedy="install one, or leave it false"):
        torch.compile(torch.neg)(torch.ones(2, device=policy.device))
    shared_prompts.register(torch.compiler.disable(shared_prompts.attend))
    # forwards of parts: hooks of a module (FSDP2) and the checkpointing of a layer cannot be compiled
    for layer in policy.layers:
        for part in layer.children():
            part.forward = torch.compile(part.forward, dynamic=True)


@dataclass
class LoRA:
    """Low-rank adapters (Hu et al., arXiv:2106.09685) that are trained instead of the weights.

    Args:
        rank: of each adapter.
        alpha: an adapter is scaled by alpha / rank.
        targets: names of the layers that get one; all linear ones but the output projection by default.
    """

    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    targets: str | list[str] = "all-linear"

    def add_to(self, policy: Policy) -> None:
        """Add fresh adapters, which change nothing yet, to a policy and freeze its own weights, in place."""
        from peft import LoraConfig
        from peft.tuners.lora import LoraLayer

        # no dropout: log mu and log pi must come from one deterministic function
        config = LoraConfig(
            r=self.rank, lora_alpha=self.alpha, target_modules=self.targets, lora_dropout=0.0
        )
        with explained(f"model.lora.targets: {self.targets!r} fits no layer", ValueError):
            policy.model.add_adapter(config)
        for layer in policy.model.modules():
            if isinstance(
                layer, LoraLayer
            ):  # next to weights on the meta device, adapters are there as well
                for name in layer.adapter_layer_names:
                    getattr(layer, name).to_empty(device="cpu")
                layer.reset_lora_parameters("default", init_lora_weights=True)


def merge_adapter(name: str, adapter: Path) -> Policy:
    """A policy with a saved adapter merged into its weights, on the CPU."""
    from peft import PeftModel

    policy = load_policy(name)
    policy.model = PeftModel.from_pretrained(policy.model, str(adapter)).merge_and_unload()
    return policy


def export_policy(policy: Policy, path: Path, state_dict: dict[str, Tensor] | None = None) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads; it appears complete or not at all. For a model
    with adapters, these are written; see `merge_adapter`. `state_dict` replaces the model's own weights."""
    disable_progress_bar()
    with atomic(path) as folder:
        with explained(f"{path} cannot be written", SafetensorError, "make room and start again"):
            policy.model.save_pretrained(folder, state_dict=state_dict)
        policy.tokenizer.save_pretrained(folder)
        for weights in folder.glob(
            "*.safetensors"
        ):  # the library makes them readable for their owner alone
            weights.chmod((folder / "tokenizer_config.json").stat().st_mode)
