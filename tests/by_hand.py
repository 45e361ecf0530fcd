"""TOPR for a Llama in one plain loop: what a careful reader of the paper writes for one shape.

It computes a prompt once for its responses and pads nothing, as the project does, but knows no
other architecture, device, loss or file. `benchmark.py` compares speed and memory with it.
"""

import argparse
from itertools import groupby

import torch
import torch.nn.functional as F
from arms import Turns
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def hidden_states(model, ids_L: Tensor, positions_L: Tensor, spans: list[tuple]) -> Tensor:
    """The last hidden states, [L, D]; spans are (start, end, keys of the prompt)."""
    decoder = model.model
    hidden = decoder.embed_tokens(ids_L)[None]
    cosine, sine = decoder.rotary_emb(hidden, positions_L[None])
    for layer in decoder.layers:
        attention = layer.self_attn
        x = layer.input_layernorm(hidden)
        heads = [
            projection(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        query, key = apply_rotary_pos_emb(heads[0], heads[1], cosine, sine)
        value = heads[2].to(query.dtype)
        outs = []
        for start, end, prompt in spans:
            own = slice(start, end)
            keys = torch.cat([key[:, :, prompt], key[:, :, own]], dim=2)
            values = torch.cat([value[:, :, prompt], value[:, :, own]], dim=2)
            before = prompt.stop - prompt.start
            shape = (end - start, end - start + before)
            mask = torch.ones(shape, dtype=torch.bool).tril(before)
            out = F.scaled_dot_product_attention(
                query[:, :, own], keys, values, attn_mask=mask, enable_gqa=True
            )
            outs.append(out)
        out = torch.cat(outs, dim=2).transpose(1, 2).flatten(2)
        hidden = hidden + attention.o_proj(out)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return decoder.norm(hidden)[0]


def lay_out(groups: list[list[dict]]) -> tuple[Tensor, Tensor, list[tuple], Tensor]:
    """Ids, positions, spans, and the places that predict the sampled tokens of each response."""
    ids: list[int] = []
    positions: list[int] = []
    spans, predict = [], []
    for group in groups:
        prompt = group[0]["prompt_ids"]
        here = slice(len(ids), len(ids) + len(prompt))
        spans.append((here.start, here.stop, slice(0, 0)))
        ids += prompt
        positions += range(len(prompt))
        for row in group:
            response = row["response_ids"]
            start = len(ids)
            spans.append((start, start + len(response), here))
            predict += [here.stop - 1, *range(start, start + len(response) - 1)]
            ids += response
            positions += range(len(prompt), len(prompt) + len(response))
    return torch.tensor(ids), torch.tensor(positions), spans, torch.tensor(predict)


def micro_batches(groups: list[list[dict]], tokens: int) -> list[list[list[dict]]]:
    """Groups that fit into one forward."""
    batches: list[list] = [[]]
    size = 0
    for group in groups:
        own = len(group[0]["prompt_ids"]) + sum(len(row["response_ids"]) for row in group)
        if size + own > tokens and batches[-1]:
            batches.append([])
            size = 0
        size += own
        batches[-1].append(group)
    return batches


def train(args: argparse.Namespace):
    import pyarrow.parquet as pq

    torch.set_num_threads(1)
    rows = pq.read_table(args.folder / "train.parquet").to_pylist()
    groups = [list(group) for _, group in groupby(rows, lambda row: row["group"])]
    each = args.batch_size // len(groups[0])
    updates = [groups[i : i + each] for i in range(0, len(groups), each)]
    mixed = args.precision == "bf16-mixed"
    turns = Turns()
    model = AutoModelForCausalLM.from_pretrained(args.folder / "policy", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    steps = 0
    for _ in range(args.epochs):
        for update in updates:
            for batch in micro_batches(update, args.microbatch_tokens):
                chosen = [row for group in batch for row in group]
                ids, positions, spans, predict = lay_out(batch)
                with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                    hidden = hidden_states(model, ids, positions, spans)
                logits = F.linear(hidden[predict].float(), model.lm_head.weight)
                target = torch.tensor([i for row in chosen for i in row["response_ids"]])
                lengths = [len(row["response_ids"]) for row in chosen]
                log_pi = -F.cross_entropy(logits, target, reduction="none")
                log_mu = torch.tensor([v for row in chosen for v in row["ref_logprobs"]])
                log_ratio = torch.stack([part.sum() for part in (log_pi - log_mu).split(lengths)])
                reward = torch.tensor([row["reward"] for row in chosen])
                weight = torch.where(reward > 0, 1.0, log_ratio.detach().exp().clamp(max=1))
                size = torch.tensor(lengths) * args.batch_size
                (-(reward * weight * log_ratio) / size).sum().backward()
                turns.tokens += sum(len(row["prompt_ids"]) for row in chosen) + sum(lengths)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        turns.end(steps)
