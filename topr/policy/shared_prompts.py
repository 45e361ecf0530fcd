"""Attention over one row that holds each prompt once, followed by all of its responses.

Nothing is padded, and a prompt is computed once for all of its responses. Log-probs and gradients
are those of one forward for each trajectory. On a GPU in half precision the attention is torch's
flash attention over sequences of any length (`flash.py`); otherwise it is `SpanAttention`.

Shapes: L tokens of the row, H heads, G heads of keys and values, D of a head; N spans of a bucket,
R queries of a span, K keys of a span.
"""

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, from_numpy, nn

from topr.batching import Span, Tokens, pack

NAME = "topr_spans"  # in transformers' registry of attention functions
LARGEST_BUCKET = 2**18  # scores of a head that stay in a CPU's cache
SMALL_BUCKET = 2**12  # up to this many scores, padding costs nothing
MASKED = -1e30  # not -inf: a pad that sees no key would get weights of NaN


class Spans:
    """The spans of a row, as an object that `torch.compile` does not look into.

    With a tuple it would compile each layer again for each number of spans.
    """

    def __init__(self, spans: tuple[Span, ...]):
        self.spans = spans


def hidden_states(model: Any, tokens: Tokens) -> Tensor:
    """Hidden states that predict the sampled tokens, [N, D]."""
    # models pass a mask of four dimensions on unchanged
    empty_mask = tokens.input_ids_L.new_empty(1, 1, 0, 0)
    output = model.get_decoder()(
        input_ids=tokens.input_ids_L[None],
        position_ids=tokens.position_ids_L[None],
        attention_mask=empty_mask,
        spans=Spans(tokens.spans),
        use_cache=False,
    )
    return output.last_hidden_state[0].index_select(0, tokens.position_N)


@torch.no_grad()
def enable_if_exact(policy: Any, bound: float = 1e-3) -> None:
    """Share prompts if log-probs stay within `bound`; otherwise pad rows, with a warning."""
    model = policy.model
    implementation = model.config._attn_implementation
    ids = np.arange(6)
    tokens = pack([ids[:3], ids[:3], ids[3:5]], [ids[3:], ids[1:3], ids[5:]]).to(policy.device)
    padded_N = policy.log_probs(tokens)
    windows = []

    def recorded(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        windows.append(kwargs.get("sliding_window"))
        return attend(*args, **kwargs)

    try:
        register(recorded)
        model.set_attn_implementation(NAME)
        difference = (policy.log_probs(tokens) - padded_N).abs().max().item()
        exact = difference <= bound and windows == expected_windows(model.config.get_text_config())
    except Exception:  # whatever a model raises about a keyword that it does not know
        exact = False
    finally:
        register(attend)
    if not exact:
        model.set_attn_implementation(implementation)
        kind = type(model).__name__
        warnings.warn(
            f"policy {policy.name!r} ({kind}) has an attention of another kind: "
            "trajectories are padded, which takes more time and memory",
            stacklevel=2,
        )


def expected_windows(config: Any) -> list[int | None]:
    """The sliding window of each layer; 0 for a layer of another kind, which cannot share."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    window_of = {"full_attention": None, "sliding_attention": window}
    return [window_of.get(kind, 0) for kind in kinds]


def register(function: Callable) -> None:
    """Let transformers' models find an attention function under `NAME`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, function)
    AttentionMaskInterface.register(NAME, eager_mask)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    spans: Spans | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function for transformers' `AttentionInterface`.

    Args:
        module: the attention layer.
        query: [1, H, L, D].
        key: [1, G, L, D].
        value: [1, G, L, D].
        attention_mask: added to the scores; used without `spans` only.
        scaling: factor of the scores.
        spans: of the row. Without them (sampling), any batch of rows with `attention_mask`.
        sliding_window: keys that a query sees, itself included; used with `spans` only.
        softcap: of Gemma 2; its trajectories are padded.

    Returns:
        [1, L, H, D], and no attention weights.
    """
    if spans is None:
        # imported late: it loads a whole model
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        mask = attention_mask
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
    if softcap is not None:
        raise NotImplementedError("attention with a soft cap")
    rows = (query[0] * scaling, key[0], value[0])
    if query.is_cuda and torch.is_autocast_enabled("cuda"):
        from topr.policy import flash

        if flash.takes(query):
            return flash.attention(*rows, spans.spans, sliding_window)[None], None
    return span_attention(*rows, spans.spans, sliding_window)[None], None


def span_attention(
    query_HLD: Tensor,
    key_GLD: Tensor,
    value_GLD: Tensor,
    spans: tuple[Span, ...],
    window: int | None,
) -> Tensor:
    """Attention over buckets of spans, [L, H, D], in float32 or float64, on any device."""
    groups, length, width = key_GLD.shape
    dtype = torch.promote_types(query_HLD.dtype, torch.float32)
    # the heads of a group, which share its keys, side by side
    query_GLW = query_HLD.view(groups, -1, length, width).transpose(1, 2).flatten(2)
    key_value = torch.cat((key_GLD, value_GLD))
    zero_row = (0, 0, 0, 1)  # behind the last; pads refer to it
    out = SpanAttention.apply(
        F.pad(query_GLW.to(dtype), zero_row),
        F.pad(key_value.to(dtype), zero_row),
        make_buckets(spans, window, query_HLD.device),
    )
    return out[:, :-1].transpose(0, 1).reshape(length, -1, width).to(query_HLD.dtype)


class SpanAttention(torch.autograd.Function):
    """Attention by matrix products over spans of similar size.

    Queries and results are [G, L + 1, (H / G) * D]. Keys, and behind them values, are
    [2 * G, L + 1, D]. The backward computes the weights again, so no scores outlive their bucket.
    On a CPU this takes half the time of one fused call for each span, whose backward is slow.
    """

    @staticmethod
    def forward(ctx, query, key_value, buckets) -> Tensor:
        ctx.save_for_backward(query, key_value)
        ctx.buckets = buckets
        out = torch.empty_like(query)
        with torch.autocast(query.device.type, enabled=False):
            for bucket in buckets:
                queries, keys, values = bucket.take(query, key_value)
                outs = torch.bmm(bucket.weights(queries, keys), values)
                out.index_copy_(1, bucket.query_rows, outs.view(len(out), -1, out.shape[2]))
        return out

    @staticmethod
    def backward(ctx, d_out):
        query, key_value = ctx.saved_tensors
        d_query = torch.empty_like(query)
        d_key_value = torch.zeros_like(key_value)
        with torch.autocast(query.device.type, enabled=False):
            for bucket in ctx.buckets:
                queries, keys, values = bucket.take(query, key_value)
                d_outs = d_out.index_select(1, bucket.query_rows).view(queries.shape)
                weight = bucket.weights(queries, keys)
                d_values = torch.bmm(weight.transpose(1, 2), d_outs)
                d_weight = torch.bmm(d_outs, values.transpose(1, 2))
                d_score = torch._softmax_backward_data(d_weight, weight, -1, weight.dtype)
                d_queries = torch.bmm(d_score, keys)
                d_keys = torch.bmm(d_score.transpose(1, 2), queries)
                d_query.index_copy_(
                    1, bucket.query_rows, d_queries.view(len(query), -1, query.shape[2])
                )
                d_keys_values = torch.cat((d_keys, d_values))
                d_key_value.index_add_(
                    1, bucket.key_rows, d_keys_values.view(len(key_value), -1, keys.shape[2])
                )
        return d_query, d_key_value, None


class Bucket(NamedTuple):
    """N spans of similar size, padded."""

    query_rows: Tensor  # [N * R]
    key_rows: Tensor  # [N * K]
    mask_NRK: Tensor  # added to the scores: 0 where a query sees a key, MASKED elsewhere

    def take(self, query: Tensor, key_value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [G * N, R * (H / G), D], keys and values [G * N, K, D]."""
        shape = (-1, self.mask_NRK.shape[2], key_value.shape[2])
        keys, values = key_value.index_select(1, self.key_rows).view(shape).chunk(2)
        queries = query.index_select(1, self.query_rows)
        return queries.view(len(keys), -1, shape[2]), keys, values

    def weights(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Softmax of the scores."""
        score = torch.bmm(queries, keys.transpose(1, 2))
        spans, rows, columns = self.mask_NRK.shape
        heads = score.shape[1] // rows
        score.view(-1, spans, rows, heads, columns).add_(self.mask_NRK[:, :, None])
        return score.softmax(-1)


@lru_cache(maxsize=4)  # each layer asks
def make_buckets(spans: tuple[Span, ...], window: int | None, device: torch.device) -> list[Bucket]:
    """Group spans so that pads add at most a fifth to the scores of a large bucket."""
    sizes = [(end - start + last - first, end - start) for start, end, first, last in spans]
    groups: list[list[Span]] = [[]]
    scores = 0  # of the last group, without pads
    most_queries = 0  # of a span of the last group
    for (keys, queries), span in sorted(zip(sizes, spans, strict=True)):
        scores += keys * queries
        most_queries = max(most_queries, queries)
        padded = (len(groups[-1]) + 1) * most_queries * keys  # no earlier span has more keys
        if groups[-1] and padded > min(LARGEST_BUCKET, max(1.2 * scores, SMALL_BUCKET)):
            groups.append([])
            scores = keys * queries
            most_queries = queries
        groups[-1].append(span)
    zero_row = spans[-1][1]
    return [make_bucket(group, zero_row, window, device) for group in groups]


def make_bucket(
    spans: list[Span], zero_row: int, window: int | None, device: torch.device
) -> Bucket:
    start_N1, end_N1, first_N1, last_N1 = np.array(spans).T[:, :, None]
    own_N1 = end_N1 - start_N1
    prompt_N1 = last_N1 - first_N1
    query_R = np.arange(own_N1.max())
    key_K = np.arange((prompt_N1 + own_N1).max())
    query_NR = np.where(query_R < own_N1, start_N1 + query_R, zero_row)
    key_NK = np.where(key_K < prompt_N1, first_N1 + key_K, start_N1 - prompt_N1 + key_K)
    key_NK[key_K >= prompt_N1 + own_N1] = zero_row
    distance_NRK = prompt_N1[:, :, None] + query_R[:, None] - key_K
    seen_NRK = distance_NRK >= 0
    if window is not None:
        seen_NRK &= distance_NRK < window
    mask_NRK = np.where(seen_NRK, np.float32(0), np.float32(MASKED))
    arrays = (query_NR.ravel(), key_NK.ravel(), mask_NRK)
    return Bucket(*(from_numpy(array).to(device, non_blocking=True) for array in arrays))
