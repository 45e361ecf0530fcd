"""The policy: a Hugging Face causal language model, loaded from a folder or the hub, and saved."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse.typing import PositiveInt
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from topr.batching import Tokens, pack
from topr.io import InputError, atomic, explained
from topr.policy import shared_prompts
from topr.policy.files import load_config, load_generation_config, load_tokenizer, resolve_policy
from topr.policy.logprobs import padded_hidden_states, token_log_probs


@dataclass
class LoRA:
    """Low-rank adapters (Hu et al., arXiv:2106.09685), trained instead of the weights.

    Args:
        rank: of each adapter.
        alpha: an adapter is scaled by alpha / rank.
        targets: names of the layers that get one; by default all linear ones but the output
            projection.
    """

    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    targets: str | list[str] = "all-linear"


class Policy(nn.Module):
    """A Hugging Face causal model with its tokenizer, and the name that it was loaded by."""

    reshard: Any  # a method that FSDP2 adds

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str):
        super().__init__()
        self.model: Any = model
        self.tokenizer: Any = tokenizer
        self.name = name
        # cuDNN's attention plans anew for every shape, and is wrong on some GPUs (pytorch#193893)
        torch.backends.cuda.enable_cudnn_sdp(False)

    def log_probs(self, tokens: Tokens) -> Tensor:
        """log pi of each sampled token at temperature 1 over the full vocabulary, [N]: float32, or
        float64 of a float64 model."""
        if self.padded:
            hidden_ND = padded_hidden_states(self.model, tokens)
        else:
            hidden_ND = shared_prompts.hidden_states(self.model, tokens)
        return token_log_probs(self.model, hidden_ND, tokens.target_N)

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
        """Ids that end a response: the tokenizer's EOS and those of the generation config, of which
        Llama 3 has two."""
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return {self.tokenizer.eos_token_id, *ends} - {None}


def load_policy(name: str) -> Policy:
    """A policy with float32 weights and dropout off, on the default device.

    Raises:
        InputError: there is none, its weights are incomplete or not finite, or its log-probs cannot
            be computed by its hidden states and a projection.
    """
    disable_progress_bar()
    tokenizer = load_tokenizer(name)
    config = load_config(name)
    with explained(f"policy {name!r} cannot be loaded as a causal model"):
        load: Any = AutoModelForCausalLM.from_pretrained
        model, loading = load(
            resolve_policy(name),
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    if missing := sorted(loading["missing_keys"]):  # they would be random numbers
        raise InputError(
            f"policy {name!r} lacks the weights {', '.join(missing[:3])}",
            "export or download it again",
        )
    policy = Policy(model, tokenizer, name)
    check_weights(policy)
    choose_forward(policy)
    return policy


def own_device() -> torch.device:
    """This process's GPU, or the CPU. Inside `with own_device():` a policy is loaded straight to
    it."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def empty_policy(name: str) -> Policy:
    """A policy without its weights: float32 parameters on the meta device, buffers initialised."""
    from accelerate import init_empty_weights

    tokenizer = load_tokenizer(name)
    config = load_config(name)
    with explained(f"policy {name!r} cannot be loaded as a causal model"):
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.tie_weights()  # `init_empty_weights` unties them
        model.generation_config = load_generation_config(name)
    return Policy(model, tokenizer, name)


def check_weights(policy: Policy):
    """Raise an InputError for weights that are not finite. All ranks must call."""
    norm: Any = get_total_norm(policy.parameters())
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if not norm.isfinite():
        raise InputError(
            f"policy {policy.name!r}: its weights hold NaN or infinity",
            "export or download it again",
        )


@torch.no_grad()
def choose_forward(policy: Policy, bound: float = 1e-3):
    """Share prompts if the model allows it.

    Raises:
        InputError: the model's own log-probs differ by `bound` from those of `Policy.log_probs`.
    """
    rows = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 5, 4, 3], [2, 1, 0, 4, 5, 3]]
    ids_BL = np.array(rows) % policy.model.config.get_text_config().vocab_size
    tokens = pack([*ids_BL[:, :3]], [*ids_BL[:, 3:]]).to(policy.device)
    logits_BLV = policy.logits(torch.from_numpy(ids_BL).to(policy.device))
    log_softmax_NV = logits_BLV[:, 2:5].flatten(0, 1).float().log_softmax(-1)
    own_N = log_softmax_NV.gather(1, tokens.target_N[:, None])[:, 0]
    difference = (own_N - policy.log_probs(tokens)).abs().max().item()
    if not difference < bound:
        raise InputError(
            f"policy {policy.name!r} does more to its logits than a projection and a soft cap: "
            f"log-probs differ by {difference:.1e}",
            "choose another model",
        )
    shared_prompts.enable_if_exact(policy, tokens, own_N, bound)


def export_policy(policy: Policy, path: Path, state_dict: dict[str, Tensor] | None = None):
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads. It appears complete or not
    at all. Of a model with adapters, only these are written.

    Args:
        state_dict: weights to write in place of the model's own.
    """
    disable_progress_bar()
    with atomic(path) as folder:
        with explained(f"{path} cannot be written", SafetensorError, "make room and start again"):
            policy.model.save_pretrained(folder, state_dict=state_dict)
        policy.tokenizer.save_pretrained(folder)
