"""Attention over one row of tokens that holds each prompt once and behind it all its responses, without padding.

Shapes: L tokens of the row, H heads, D of a head; R queries of a span and the K keys that they see.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, from_numpy, nn

# Queries start:end see themselves, causally, behind the tokens first:last of their prompt (first = last: nothing).
# A row's spans follow each other without a gap, and a prompt's own comes before those of its responses.
Span = tuple[int, int, int, int]
NAME = "topr_spans"  # in transformers' registry of attention functions


def register(function: Callable) -> None:
    """Let transformers' models find an attention function under `NAME`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, function)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    spans: tuple[Span, ...] | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """An attention function for transformers' `AttentionInterface`.

    Args:
        module: the attention layer.
        query: [1, H, L, D]; without `spans` any batch of rows.
        key: of a divisor of H heads.
        value: as `key`.
        attention_mask: read only without `spans`, when models attend as they always do.
        scaling: of the scores, by default 1/sqrt(D).
        sliding_window: tokens that a query sees, itself included.
        softcap: c, which makes c tanh(score/c) of a score.
        spans: what each query of the row sees.
        kwargs: what other attention functions take.

    Returns:
        [1, L, H, D], and no attention weights.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if spans is None:
        return _attend_as_always(module, query, key, value, attention_mask, scaling, softcap, kwargs)
    half = query.dtype in (torch.bfloat16, torch.float16)
    if query.is_cuda and half and softcap is None and query.shape[-1] <= 256 and torch.__version__ >= "2.13":
        return _attend_on_gpu(query[0], key[0], value[0], spans, scaling, sliding_window)[None], None
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    return SpanAttention.apply(query[0], key[0], value[0], spans, scaling, sliding_window, softcap)[None], None


def _attend_as_always(module, query, key, value, mask, scaling, softcap, kwargs) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    if softcap is None:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
    key, value = (repeat_kv(tensor, query.shape[1] // key.shape[1]) for tensor in (key, value))
    score = softcap * torch.tanh(query @ key.transpose(2, 3) * (scaling / softcap))
    if mask is None:  # plainly causal
        mask = torch.ones(score.shape[2:], dtype=torch.bool, device=score.device).tril(key.shape[2] - query.shape[2])
    weight = score.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
    return (weight @ value).transpose(1, 2).contiguous(), None


def _attend_on_gpu(query, key, value, spans, scaling, window) -> Tensor:
    """Flash attention over sequences of any length: the keys and values of a prompt are repeated for each response."""
    from torch.nn.attention.varlen import varlen_attn

    rows, ends_of_queries, ends_of_keys, longest = _sequences(spans, query.device)
    query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    key, value = (tensor.index_select(0, rows) for tensor in (key, value))
    return varlen_attn(
        query.contiguous(), key, value, ends_of_queries, ends_of_keys, *longest,
        scale=scaling, window_size=(-1 if window is None else window - 1, 0), enable_gqa=True,
    )  # fmt: skip


@lru_cache(maxsize=4)  # each layer asks
def _sequences(spans: tuple[Span, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor, tuple[int, int]]:
    """Rows of the keys of each span, ends of the queries' and of the keys' sequences, the longest of either."""
    rows = [np.r_[first:last, start:end] for start, end, first, last in spans]
    queries, keys = [end - start for start, end, *_ in spans], [len(keys) for keys in rows]
    ends = (np.cumsum([0, *lengths], dtype=np.int32) for lengths in (queries, keys))
    arrays = (from_numpy(array).to(device) for array in (np.concatenate(rows), *ends))
    return *arrays, (max(queries), max(keys))


class SpanAttention(torch.autograd.Function):
    """Attention span by span with matrix products, on any device, in float32 or float64.

    The weights are computed again in the backward: nothing quadratic in length outlives its span. On a CPU this takes
    about half the time of one fused call a span, whose backward is slow.
    """

    @staticmethod
    def forward(ctx, query, key, value, spans, scaling, window, softcap) -> Tensor:
        ctx.given = spans, scaling, window, softcap
        query_HLD, key_HLD, value_HLD = (_exact(tensor) for tensor in (query, key, value))
        out_LHD = query_HLD.new_empty(query.shape[1], query.shape[0], query.shape[2])
        with torch.autocast(query.device.type, enabled=False):
            for span in spans:
                weight_HRK, _ = _weights(query_HLD, key_HLD, span, scaling, window, softcap)
                out_LHD[span[0] : span[1]].transpose(0, 1).copy_(weight_HRK @ _seen(value_HLD, span))
        ctx.save_for_backward(query, key, value, out_LHD)
        return out_LHD.to(query.dtype)

    @staticmethod
    def backward(ctx, d_out_LHD):
        *given, out_LHD = ctx.saved_tensors
        spans, scaling, window, softcap = ctx.given
        query_HLD, key_HLD, value_HLD = (_exact(tensor) for tensor in given)
        d_out_HLD = _exact(d_out_LHD).transpose(0, 1)
        mean_HL1 = (d_out_HLD * out_LHD.transpose(0, 1)).sum(-1, keepdim=True)
        d_query, d_key, d_value = (torch.empty_like(out_LHD).transpose(0, 1) for _ in range(3))
        with torch.autocast(query_HLD.device.type, enabled=False):
            for span in spans:
                start, end, first, last = span
                weight_HRK, slope_HRK = _weights(query_HLD, key_HLD, span, scaling, window, softcap)
                d_out = d_out_HLD[:, start:end]
                d_score = d_out @ _seen(value_HLD, span).transpose(1, 2)
                d_score.sub_(mean_HL1[:, start:end]).mul_(weight_HRK)
                if slope_HRK is not None:
                    d_score.mul_(slope_HRK)
                d_query[:, start:end] = d_score @ _seen(key_HLD, span)
                for gradient, found in (
                    (d_key, d_score.transpose(1, 2) @ query_HLD[:, start:end]),
                    (d_value, weight_HRK.transpose(1, 2) @ d_out),
                ):
                    gradient[:, start:end] = found[:, last - first :]
                    gradient[:, first:last] += found[:, : last - first]
        found = d_query.mul_(scaling), d_key.mul_(scaling), d_value
        return *(gradient.to(tensor.dtype) for gradient, tensor in zip(found, given, strict=True)), *[None] * 4


def _exact(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _seen(tensor_HLD: Tensor, span: Span) -> Tensor:
    """Keys or values that a span's queries see, [H, K, D]."""
    start, end, first, last = span
    own = tensor_HLD[:, start:end]
    return torch.cat((tensor_HLD[:, first:last], own), dim=1) if last > first else own


def _weights(query_HLD, key_HLD, span, scaling, window, softcap) -> tuple[Tensor, Tensor | None]:
    """Softmax of a span's scores [H, R, K], and the slope of their soft cap."""
    start, end, first, last = span
    keys = end - start + last - first
    mask_RK = _mask(-(-keys // 256) * 256, window, query_HLD.dtype, query_HLD.device)[
        keys - (end - start) : keys, :keys
    ]
    query, key = query_HLD[:, start:end], _seen(key_HLD, span).transpose(1, 2)
    if softcap is None:
        return torch.baddbmm(mask_RK, query, key, alpha=scaling).softmax(-1), None
    capped_HRK = torch.tanh(query @ key * (scaling / softcap))
    return (softcap * capped_HRK + mask_RK).softmax(-1), 1 - capped_HRK.square()


@lru_cache(maxsize=8)
def _mask(size: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where a query sees a key, -infinity elsewhere, [size, size]."""
    ones = torch.ones(size, size, dtype=torch.bool, device=device)
    hidden = ones.triu(1) if window is None else ones.triu(1) | ones.tril(-window)
    return torch.zeros(size, size, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
