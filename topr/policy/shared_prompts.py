"""For speed only: attention over a row that holds each prompt once, followed by all its responses, without padding.

Shapes: L tokens of the row, H heads, G of them for keys and values, D of a head; N spans of a bucket, R queries of a
span and the K keys that they see. This file can be deleted: rows are then padded and prompts computed for each
response, with the same log-probs and gradients.
"""

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, from_numpy, nn
from torch.nn.utils.rnn import pad_sequence

from topr.batching import Span, Tokens, pack

LARGEST_BUCKET, SMALL_BUCKET = (
    2**18,
    2**12,
)  # scores of a head: what stays in a cache, what padding cannot make slow
MASKED = (
    -1e30
)  # of a score: its weight is 0, and a pad that sees nothing has weights that are not NaN
NAME = "topr_spans"  # in transformers' registry of attention functions


class Spans:
    """The spans of a row, hidden from `torch.compile`, which would compile a layer anew for each number of them."""

    def __init__(self, spans: tuple[Span, ...]):
        self.spans = spans


def hidden_states(model: Any, tokens: Tokens) -> Tensor:
    """Hidden states that predict the response tokens, [N, D]."""
    empty_mask = tokens.input_ids_L.new_empty(
        1, 1, 0, 0
    )  # models pass a mask of four dimensions on as it is
    row = {"input_ids": tokens.input_ids_L[None], "position_ids": tokens.position_ids_L[None]}
    output = model.get_decoder()(
        **row, attention_mask=empty_mask, spans=Spans(tokens.spans), use_cache=False
    )
    return output.last_hidden_state[0].index_select(0, tokens.position_N)


@torch.no_grad()
def enable_if_exact(policy: Any, bound: float = 1e-3) -> None:
    """Share prompts if hidden states stay within `bound` of the largest; otherwise rows are padded, with a warning."""
    model, config = policy.model, policy.model.config.get_text_config()
    ids = np.arange(6) % config.vocab_size
    tokens = pack([ids[:3], ids[:3], ids[3:5]], [ids[3:], ids[1:3], ids[5:]]).to(policy.device)
    _, padded = policy(tokens)
    implementation, windows = model.config._attn_implementation, []

    def recorded(*arguments: Any, **keywords: Any) -> tuple[Tensor, None]:
        windows.append(keywords.get("sliding_window"))
        return attend(*arguments, **keywords)

    try:
        register(recorded)
        model.set_attn_implementation(NAME)
        _, shared = policy(tokens)
        exact = windows == _windows(config) and bool(
            (shared - padded).abs().max() <= bound * padded.abs().max()
        )
    except Exception:  # whatever a model raises about a keyword that it does not know
        exact = False
    finally:
        register(attend)
    if not exact:
        model.set_attn_implementation(implementation)
        message = (
            f"policy {policy.name!r} ({type(model).__name__}) has an attention of another kind"
        )
        warnings.warn(
            f"{message}: trajectories are padded, which takes more time and memory", stacklevel=2
        )


def _windows(config) -> list[int | None]:
    """The sliding window of each layer; 0 for layers of another kind, which our attention does not serve."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [{"full_attention": None, "sliding_attention": window}.get(kind, 0) for kind in kinds]


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
    spans: Spans | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """An attention function for transformers' `AttentionInterface`: [1, L, H, D], and no attention weights. The query
    is [1, H, L, D], key and value have G heads. The window counts the query itself. `softcap` c turns a score into c
    tanh(score/c). Without `spans`, any batch of rows is attended to as usual, with the mask."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if spans is None:
        return _attend_plainly(module, query, key, value, attention_mask, scaling, softcap, kwargs)
    kind = query.device.type  # below: rotary embeddings leave float32
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    if dtype in (torch.bfloat16, torch.float16) and softcap is None and _has_flash(query):
        halves = [tensor[0].to(dtype) for tensor in (query, key, value)]
        return _attend_on_gpu(halves, spans.spans, scaling, sliding_window)[None], None
    out_HLD = SpanAttention.apply(
        query[0], key[0], value[0], spans.spans, scaling, sliding_window, softcap
    )
    return out_HLD.transpose(0, 1)[None], None


def _has_flash(query: Tensor) -> bool:
    """Whether flash attention over spans takes queries of this device and width."""
    known = (
        query.is_cuda
        and torch.__version__ >= "2.13"
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )
    return known and query.shape[-1] <= 256 and query.shape[-1] % 8 == 0


def _attend_plainly(
    module, query, key, value, mask, scaling, softcap, kwargs
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    if softcap is None:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
    key, value = (repeat_kv(tensor, query.shape[1] // key.shape[1]) for tensor in (key, value))
    score = softcap * torch.tanh(query @ key.transpose(2, 3) * (scaling / softcap))
    if mask is None:  # plainly causal
        mask = torch.ones(score.shape[2:], dtype=torch.bool, device=score.device).tril(
            key.shape[2] - query.shape[2]
        )
    # not -inf: a pad on the left sees nothing, and NaN there would reach every token of the next layer
    score = score.masked_fill(~mask, torch.finfo(score.dtype).min)
    weight = score.softmax(-1, dtype=torch.float32).to(value.dtype)
    return (weight @ value).transpose(1, 2).contiguous(), None


def _attend_on_gpu(
    tensors: list[Tensor], spans: tuple[Span, ...], scaling: float, window: int | None
) -> Any:
    """Flash attention over sequences of any length: the keys and values of a prompt are repeated for each response.
    Only one layer's copies exist at a time: the backward makes them again."""
    from torch.nn.attention.varlen import varlen_attn

    rows, ends_of_queries, ends_of_keys, longest = _sequences(spans, tensors[0].device)
    query, *originals = (tensor.transpose(0, 1) for tensor in tensors)
    key, value = (tensor.index_select(0, rows) for tensor in originals)
    copied, shape = [tensor.untyped_storage()._cdata for tensor in (key, value)], key.shape

    def pack(tensor: Tensor) -> Tensor | int:
        storage = tensor.untyped_storage()._cdata
        return (
            copied.index(storage)
            if storage in copied and tensor.shape == shape
            else tensor.detach()
        )

    def unpack(saved: Tensor | int) -> Tensor:
        return originals[saved].detach().index_select(0, rows) if isinstance(saved, int) else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return varlen_attn(
            query.contiguous(), key, value, ends_of_queries, ends_of_keys, *longest,
            scale=scaling, window_size=(-1 if window is None else window - 1, 0), enable_gqa=True,
        )  # fmt: skip


@lru_cache(maxsize=4)  # each layer asks
def _sequences(
    spans: tuple[Span, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, tuple[int, int]]:
    """Rows of the keys of each span, ends of the queries' and of the keys' sequences, the longest of either."""
    rows = [np.r_[first:last, start:end] for start, end, first, last in spans]
    queries, keys = [end - start for start, end, *_ in spans], [len(keys) for keys in rows]
    arrays = (
        np.concatenate(rows),
        *(np.cumsum([0, *lengths], dtype=np.int32) for lengths in (queries, keys)),
    )
    index, ends_of_queries, ends_of_keys = (
        from_numpy(a).to(device, non_blocking=True) for a in arrays
    )
    return index, ends_of_queries, ends_of_keys, (max(queries), max(keys))


class SpanAttention(torch.autograd.Function):
    """Attention with matrix products over buckets of spans of similar size, on any device, in float32 or float64. The
    weights are computed again in the backward: nothing quadratic in length outlives its bucket. On a CPU this takes
    half the time of a fused call for each span, whose backward is slow."""

    @staticmethod
    def forward(ctx, query_HLD, key_GLD, value_GLD, spans, scaling, window, softcap) -> Tensor:
        ctx.save_for_backward(query_HLD, key_GLD, value_GLD)
        ctx.buckets, ctx.scaling, ctx.softcap = (
            _buckets(spans, window, query_HLD.device),
            scaling,
            softcap,
        )
        query, key, value = (_exact(tensor) for tensor in (query_HLD, key_GLD, value_GLD))
        query, out, groups = query.mul_(scaling), torch.empty_like(query), len(key)
        with torch.autocast(query.device.type, enabled=False):
            for index_NR, index_NK, mask_NRK in ctx.buckets:
                keys, values = (_take(rows, index_NK, groups) for rows in (key, value))
                weight, _ = _weights(_take(query, index_NR, groups), keys, mask_NRK, softcap)
                out.index_copy_(
                    1, index_NR.flatten(), _give(torch.bmm(weight, values), index_NR, groups)
                )
        return out[:, :-1].to(query_HLD.dtype)

    @staticmethod
    def backward(ctx, d_out_HLD):
        saved = ctx.saved_tensors
        query, key, value, d_out = (_exact(tensor) for tensor in (*saved, d_out_HLD))
        query, groups = query.mul_(ctx.scaling), len(key)
        d_query, d_key, d_value = (
            torch.empty_like(query),
            torch.zeros_like(key),
            torch.zeros_like(value),
        )
        with torch.autocast(query.device.type, enabled=False):
            for index_NR, index_NK, mask_NRK in ctx.buckets:
                queries, d_outs = (_take(rows, index_NR, groups) for rows in (query, d_out))
                keys, values = (_take(rows, index_NK, groups) for rows in (key, value))
                weight, slope = _weights(queries, keys, mask_NRK, ctx.softcap)
                seen, d_values = index_NK.flatten(), torch.bmm(weight.transpose(1, 2), d_outs)
                d_value.index_add_(1, seen, _give(d_values, index_NK, groups))
                d_score = torch.bmm(d_outs, values.transpose(1, 2))
                d_score = torch._softmax_backward_data(d_score, weight, -1, weight.dtype)
                if slope is not None:
                    d_score.mul_(slope)
                d_query.index_copy_(
                    1, index_NR.flatten(), _give(torch.bmm(d_score, keys), index_NR, groups)
                )
                d_key.index_add_(
                    1, seen, _give(torch.bmm(d_score.transpose(1, 2), queries), index_NK, groups)
                )
        found = d_query.mul_(ctx.scaling), d_key, d_value
        return *(
            gradient[:, :-1].to(given.dtype) for gradient, given in zip(found, saved, strict=True)
        ), *[None] * 4


def _exact(rows_HLD: Tensor) -> Tensor:
    """Rows in float32 or float64, and behind them one of zeros, which pads stand for."""
    return F.pad(rows_HLD if rows_HLD.dtype == torch.float64 else rows_HLD.float(), (0, 0, 0, 1))


def _take(rows_HLD: Tensor, index_NR: Tensor, groups: int) -> Tensor:
    """The rows of N spans, [groups * N, heads of a group * R, D]; a copy only where a group has several heads."""
    (n, r), (heads, _, d) = index_NR.shape, rows_HLD.shape
    rows = rows_HLD.index_select(1, index_NR.flatten()).view(groups, heads // groups, n, r, d)
    return rows.transpose(1, 2).reshape(groups * n, -1, d)


def _give(values: Tensor, index_NR: Tensor, groups: int) -> Tensor:
    """Inverse of `_take`: [H, N * R, D]."""
    (n, r), d = index_NR.shape, values.shape[-1]
    return values.view(groups, n, -1, r, d).transpose(1, 2).reshape(-1, n * r, d)


def _weights(
    queries: Tensor, keys: Tensor, mask_NRK: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Softmax of the scores, shaped as they are, and the slope of their soft cap."""
    score, slope = torch.bmm(queries, keys.transpose(1, 2)), None
    if softcap is not None:
        capped = torch.tanh(score / softcap)
        score, slope = softcap * capped, 1 - capped.square()
    n, r, k = mask_NRK.shape
    score.view(-1, n, score.shape[1] // r, r, k).add_(mask_NRK[:, None])
    return score.softmax(-1), slope


@lru_cache(maxsize=4)  # each layer asks, forward and backward
def _buckets(
    spans: tuple[Span, ...], window: int | None, device: torch.device
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Spans of similar size: rows of their queries [N, R] and keys [N, K], padded by the row behind the last, and 0
    where a query sees a key, `MASKED` elsewhere [N, R, K]."""
    nowhere = spans[-1][1]
    sized = sorted(
        (end - start + last - first, end - start, i)
        for i, (start, end, first, last) in enumerate(spans)
    )
    groups: list[list[Span]] = [[]]
    area = longest = 0  # scores and most queries of a span in the last group
    for keys, queries, i in sized:
        area, longest = area + keys * queries, max(longest, queries)
        padded = (len(groups[-1]) + 1) * longest * keys
        if groups[-1] and padded > min(LARGEST_BUCKET, max(1.2 * area, SMALL_BUCKET)):
            groups.append([])
            area, longest = keys * queries, queries
        groups[-1].append(spans[i])
    return [_bucket(group, window, nowhere, device) for group in groups]


def _bucket(
    spans: list[Span], window: int | None, nowhere: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    rows = [torch.arange(start, end) for start, end, *_ in spans]
    keys = [
        torch.cat((torch.arange(*span[2:]), own)) for span, own in zip(spans, rows, strict=True)
    ]
    index_NR, index_NK = (
        pad_sequence(found, batch_first=True, padding_value=nowhere) for found in (rows, keys)
    )
    before_N11 = torch.tensor([last - first for *_, first, last in spans])[:, None, None]
    query_R1, key_K = torch.arange(index_NR.shape[1])[:, None], torch.arange(index_NK.shape[1])
    distance_NRK = query_R1 + before_N11 - key_K
    hidden_NRK = (
        distance_NRK < 0 if window is None else (distance_NRK < 0) | (distance_NRK >= window)
    )
    mask_NRK = torch.zeros(hidden_NRK.shape).masked_fill_(hidden_NRK, MASKED)
    index_NR, index_NK, mask_NRK = (
        a.to(device, non_blocking=True) for a in (index_NR, index_NK, mask_NRK)
    )
    return index_NR, index_NK, mask_NRK
