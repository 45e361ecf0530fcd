"""Torch's flash attention over spans, for GPUs in the precision of autocast.

Shapes: L tokens of the row, H heads, G heads of keys and values, D of a head; S keys of all spans
laid end to end.
"""

from functools import lru_cache
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, from_numpy
from torch.nn.attention import varlen

from topr.batching import Spans, seen_by

# torch 2.11 lacks the argument, and takes grouped heads without
GROUPED_HEADS = dict.fromkeys(
    {"enable_gqa"} & signature(varlen.varlen_attn).parameters.keys(), True
)


def takes(query: Tensor) -> bool:
    """Whether flash attention takes queries of this GPU and width."""
    recent = torch.cuda.get_device_capability(query.device) >= (8, 0)
    return recent and query.shape[-1] in range(8, 257, 8)


def attention(
    query_LHD: Tensor,
    key_LGD: Tensor,
    value_LGD: Tensor,
    spans: Spans,
    window: int | None,
    scaling: float,
) -> Tensor:
    """Flash attention over sequences of any length, [L, H, D], in the precision of autocast.

    The keys and values of a prompt are copied for each of its responses.
    """
    rows_S, *sequences = key_sequences(spans, query_LHD.device)
    attend: Any = varlen.varlen_attn
    # rotary embeddings leave float32
    dtype = torch.get_autocast_dtype("cuda")
    return attend(
        query_LHD.to(dtype).contiguous(),
        key_LGD.to(dtype).index_select(0, rows_S),
        value_LGD.to(dtype).index_select(0, rows_S),
        *sequences,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **GROUPED_HEADS,
    )


@lru_cache(maxsize=4)  # each layer asks
def key_sequences(spans: Spans, device: torch.device) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """The keys of all spans laid end to end, for flash attention.

    Returns:
        The place in the row of each key [S]; where the queries and the keys of each span start,
        and the last end [spans + 1]; the most queries and the most keys of a span.
    """
    rows = [seen_by(span) for span in spans]
    queries = torch.tensor([0] + [end - start for start, end, _, _ in spans])
    keys = torch.tensor([0] + list(map(len, rows)))
    rows_S = from_numpy(np.concatenate(rows)).to(device)
    query_ends = queries.cumsum(0, dtype=torch.int32).to(device)
    key_ends = keys.cumsum(0, dtype=torch.int32).to(device)
    return rows_S, query_ends, key_ends, int(queries.max()), int(keys.max())
