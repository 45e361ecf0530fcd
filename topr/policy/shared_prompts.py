"""Attention over one row that holds each prompt once, followed by all of its responses.

Nothing is padded, and a prompt is computed once for all of its responses. Log-probs and gradients
are those of one forward for each trajectory. On a GPU in half precision the attention is torch's
flash attention over sequences of any length (`flash.py`); otherwise it is `span_attention`.

Shapes: L tokens of the row, H heads, G heads of keys and values, D of a head; N spans of a bucket,
R queries of a span, K keys of a span.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, from_numpy, nn
from torch.nn.utils.rnn import pad_sequence

from topr.batching import Span, Spans, Tokens, seen_by

NAME = "topr_spans"  # in transformers' registry of attention functions
STEP = 16  # a larger one wastes memory on pads, a smaller one time on calls
MASKED = -1e30  # not -inf: a pad that sees no key would get weights of NaN


def hidden_states(model, tokens: Tokens) -> Tensor:
    """Hidden states that predict the sampled tokens, [N, D]."""
    # models pass a mask of four dimensions on unchanged
    empty_mask = tokens.input_ids_L.new_empty(1, 1, 0, 0)
    output = model.get_decoder()(
        input_ids=tokens.input_ids_L[None],
        position_ids=tokens.position_ids_L[None],
        attention_mask=empty_mask,
        spans=tokens.spans,
        use_cache=False,
    )
    return output.last_hidden_state[0].index_select(0, tokens.position_N)


def enable_if_exact(policy, tokens: Tokens, expected_N: Tensor, bound: float):
    """Share prompts if log-probs stay within `bound`; otherwise pad rows, with a warning."""
    model = policy.model
    implementation = model.config._attn_implementation
    windows = []

    def recorded(*args, **kwargs):
        # A soft cap, which `attend` ignores, is recorded as a window, so that the comparison below
        # fails. An error here would leave a sharded model gathered.
        windows.append(kwargs.get("softcap", kwargs.get("sliding_window")))
        return attend(*args, **kwargs)

    exact = False
    register(recorded)
    with suppress(Exception):  # whatever a model raises about a keyword that it does not know
        model.set_attn_implementation(NAME)
        difference = (policy.log_probs(tokens) - expected_N).abs().max().item()
        exact = difference < bound and windows == layer_windows(model.config.get_text_config())
    register(attend)
    if not exact:
        model.set_attn_implementation(implementation)
        warnings.warn(
            f"policy {policy.name!r} ({type(model).__name__}) has an attention of another kind: "
            "trajectories are padded, which costs time",
            stacklevel=2,
        )


def layer_windows(config) -> list[int | None]:
    """The sliding window of each layer; 0 for a layer of another kind, which cannot share."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    window_of = {"full_attention": None, "sliding_attention": window}
    return [window_of.get(kind, 0) for kind in kinds]


def register(function: Callable):
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
    **kwargs,
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

    Returns:
        [1, L, H, D], and no attention weights.
    """
    if spans is None:
        # imported late: it loads a whole model
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    query_LHD, key_LGD, value_LGD = (rows[0].transpose(0, 1) for rows in (query, key, value))
    given = (query_LHD, key_LGD, value_LGD, spans, sliding_window, scaling)
    if query.is_cuda and torch.is_autocast_enabled("cuda"):
        from topr.policy import flash

        if flash.takes(query):
            return flash.attention(*given)[None], None
    return span_attention(*given)[None], None


def span_attention(
    query_LHD: Tensor,
    key_LGD: Tensor,
    value_LGD: Tensor,
    spans: Spans,
    window: int | None,
    scaling: float,
) -> Tensor:
    """Attention over buckets of spans, [L, H, D], in float32 or float64, on any device.

    Copies are gathered and results put back once for all buckets, because each such operation
    clears memory for a whole row in its backward.
    """
    if query_LHD.is_cuda:  # where no fused kernel takes grouped heads with a mask
        repeats = query_LHD.shape[1] // key_LGD.shape[1]
        key_LGD = key_LGD.repeat_interleave(repeats, dim=1)
        value_LGD = value_LGD.repeat_interleave(repeats, dim=1)
    buckets = make_buckets(spans, window, query_LHD.device)
    dtype = torch.promote_types(query_LHD.dtype, torch.float32)
    queries = query_LHD.to(dtype).index_select(0, buckets.query_rows)
    keys = key_LGD.to(dtype).index_select(0, buckets.key_rows)
    values = value_LGD.to(dtype).index_select(0, buckets.key_rows)
    outs = []
    with torch.autocast(query_LHD.device.type, enabled=False):
        for query, key, value, mask_N1RK in zip(
            queries.split(buckets.query_sizes),
            keys.split(buckets.key_sizes),
            values.split(buckets.key_sizes),
            buckets.masks,
            strict=True,
        ):
            shape = (len(mask_N1RK), -1)
            out_NHRD = F.scaled_dot_product_attention(  # type: ignore[misc]
                *[rows.unflatten(0, shape).transpose(1, 2) for rows in (query, key, value)],
                attn_mask=mask_N1RK.to(dtype),
                scale=scaling,
                enable_gqa=key.shape[1] < query.shape[1],
            )
            outs.append(out_NHRD.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).index_select(0, buckets.place_L).to(query_LHD.dtype)


class Buckets(NamedTuple):
    """Spans of similar size side by side, padded to the largest of their bucket, all buckets laid
    end to end."""

    query_rows: Tensor  # where in the row each query stands
    key_rows: Tensor
    query_sizes: list[int]  # N * R of each bucket
    key_sizes: list[int]  # N * K
    masks: list[Tensor]  # [N, 1, R, K], added to scores: 0 where a query sees a key, else MASKED
    place_L: Tensor  # where each token of the row stands among the queries


@lru_cache(maxsize=2)  # each layer asks; a model has up to two windows
def make_buckets(spans: Spans, window: int | None, device: torch.device) -> Buckets:
    """Group spans whose numbers of queries and keys round down to the same multiples of STEP."""
    length = spans[-1][1]
    queries, keys, masks = [], [], []
    for _, bucket in groupby(sorted(spans, key=rounded_size), rounded_size):
        bucket_spans = list(bucket)
        query_NR = pad([np.arange(start, end) for start, end, _, _ in bucket_spans], length)
        key_NK = pad([seen_by(span) for span in bucket_spans], length)
        prompt_N = torch.tensor([last - first for _, _, first, last in bucket_spans])
        query_R = torch.arange(query_NR.shape[1])
        key_K = torch.arange(key_NK.shape[1])
        distance_NRK = prompt_N[:, None, None] + query_R[:, None] - key_K
        seen_NRK = (distance_NRK >= 0) & (distance_NRK < (window or length))
        queries.append(query_NR.flatten())
        keys.append(key_NK.flatten())
        masks.append(torch.where(seen_NRK, 0.0, MASKED)[:, None].to(device, non_blocking=True))
    query_rows = torch.cat(queries)
    key_rows = torch.cat(keys)
    return Buckets(
        # pads stand for any token
        query_rows=query_rows.clamp(max=length - 1).to(device, non_blocking=True),
        key_rows=key_rows.clamp(max=length - 1).to(device, non_blocking=True),
        query_sizes=list(map(len, queries)),
        key_sizes=list(map(len, keys)),
        masks=masks,
        # each token is a query once; pads sort behind them
        place_L=query_rows.argsort()[:length].to(device, non_blocking=True),
    )


def rounded_size(span: Span) -> tuple[int, int]:
    """Queries and keys of a span, in multiples of STEP."""
    start, end, first, last = span
    return (end - start) // STEP, (end - start + last - first) // STEP


def pad(rows: list[np.ndarray], value: int) -> Tensor:
    """Rows of one length."""
    return pad_sequence([from_numpy(row) for row in rows], True, value)
