"""Rows that are refilled compute what a response alone would, sample from the same distribution, and never wait."""

from collections.abc import Iterable
from functools import wraps
from itertools import product

import numpy as np
import pytest
import torch
import transformers
from conftest import make_policy
from test_sampling import load

from topr.generation import Rows, generate, sample_tokens
from topr.logprobs import score
from topr.lora import LoRA
from topr.policy import check_forward, equip, load_policy
from topr.sampling import LocalSampler, Sampling

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.4,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 5},
    "Gemma2": WINDOWS | CAPS,
    "Gemma3Text": WINDOWS,
    "GPTNeoX": {"rotary_pct": 0.5},
    "GPT2": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}
PROMPTS = [
    np.random.default_rng(i).integers(2, 40, length).tolist() for i, length in enumerate((7, 1, 12, 3, 12, 5, 2))
]
LONGEST = 40


def make(family: str, **changes):
    torch.manual_seed(0)
    name = family.removesuffix("Text")
    config = getattr(transformers, f"{family if family != 'GPT2' else name}Config")(
        **SIZES | FAMILIES.get(family, {}) | changes
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    equip(model)
    check_forward(model, family)  # its attention is ours then, as that of every policy
    return model if family == "Gemma2" else model.double()  # its softmax, in float32, makes NaN of float64's masks


def ended(ids: list[int]) -> bool:
    return ids[-1] % 13 == 1 or len(ids) == LONGEST


def greedy(logits_RV: torch.Tensor) -> torch.Tensor:
    return logits_RV.argmax(-1)


@torch.no_grad()
def run(model, prompts, n, rows, draw=greedy, interrupted=lambda: False, ended=ended):
    return generate(model, prompts, n, rows, draw, ended, interrupted, LONGEST)


def alone(model, prompt: list[int]) -> list[int]:
    """transformers' greedy response to one prompt."""
    config = transformers.GenerationConfig(max_new_tokens=LONGEST, do_sample=False)
    ids = model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()
    return ids[: next(k for k in range(1, LONGEST + 1) if ended(ids[:k]))]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_responses_equal_those_of_each_prompt_alone(family, monkeypatch):
    model, moved, move = make(family), [], Rows._move
    monkeypatch.setattr(
        Rows, "_move", lambda self, rows: (moved.append((len(rows), len(self.start))), move(self, rows))
    )
    expected = [[alone(model, prompt)] * 2 for prompt in PROMPTS]
    lengths = {len(ids) for ids, *_ in expected}
    assert len(lengths) > 3 and max(lengths) > 15, lengths  # ragged, past every window
    for rows in (3, 8, 30):
        assert run(model, PROMPTS, 2, rows) == expected, rows
    assert any(left == there for left, there in moved if left < 8)  # at the end of the buffers
    assert any(left < there for left, there in moved)  # a batch that shrinks


def exact(model, prompt: list[int], longest: int, sampling: Sampling) -> dict[tuple, float]:
    """The probability of each response, from whole forwards and with the tokens' ranks sorted in numpy."""
    shares: dict[tuple, float] = {}

    def follow(ids: tuple, share: float) -> None:
        if ids and (ids[-1] == 1 or len(ids) == longest):
            shares[ids] = share
            return
        with torch.no_grad():
            logits = model(torch.tensor([prompt + list(ids)])).logits[0, -1].numpy()
        scores = np.exp(logits / sampling.temperature)
        order = np.argsort(-scores)
        order = order[: sampling.top_k or None]
        p = scores[order] / scores[order].sum()
        order = order[: 1 + int((np.cumsum(p) < sampling.top_p).sum())]
        for token in order:
            follow((*ids, int(token)), share * scores[token] / scores[order].sum())

    follow((), 1.0)
    return shares


@pytest.mark.parametrize(
    "how", [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.8), (1.5, 4, 0.9)], ids=lambda how: str(how)
)
def test_samples_follow_the_exact_distribution(how):
    model, n, longest, sampling = make("Llama", vocab_size=6, initializer_range=0.2), 3000, 3, Sampling(*how, 3)
    torch.manual_seed(1)
    sampled = run(
        model,
        prompts := [[2, 3, 4, 5], [3]],
        n,
        57,
        lambda logits_RV: sample_tokens(logits_RV, *how),
        ended=lambda ids: ids[-1] == 1 or len(ids) == longest,
    )
    for prompt, responses in zip(prompts, sampled, strict=True):
        assert len(responses) == n
        shares = exact(model, prompt, longest, sampling)
        assert sum(shares.values()) == pytest.approx(1)
        counts = dict.fromkeys(shares, 0)
        for ids in responses:
            counts[tuple(ids)] += 1  # a response of no probability is an error
        common = [ids for ids, share in shares.items() if share * n >= 5]
        statistic = sum((counts[ids] - n * shares[ids]) ** 2 / (n * shares[ids]) for ids in common)
        assert len(common) > 3 and statistic < len(common) + 5 * np.sqrt(2 * len(common))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_log_probs_seen_in_sampling_are_those_scored(tmp_path, monkeypatch, autocast, lora):
    model = load_policy(str(make_policy(tmp_path / "base", scale=0.5)))
    if lora:
        LoRA(rank=2).add_to(model)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    seen: dict[int, list[float]] = {}
    log_probs_RV, append = torch.empty(0), Rows.append

    def draw(logits_RV):
        nonlocal log_probs_RV
        log_probs_RV = logits_RV.float().log_softmax(-1)
        return sample_tokens(logits_RV, 1.0, 0, 1.0)

    def record(self, token_R, rows, ended):
        for row, token, log_probs_V in zip(rows, token_R.tolist(), log_probs_RV, strict=True):
            if self.responses[row] is not None:
                seen.setdefault(id(self.responses[row]), []).append(log_probs_V[token].item())
        append(self, token_R, rows, ended)

    monkeypatch.setattr(Rows, "append", record)
    prompts = [[5, 6], [7], [8, 9, 10, 11, 12]]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        sampled = run(model.eval(), prompts, 20, 7, draw)
        flat = [
            (np.array(prompt), np.array(ids)) for prompt, some in zip(prompts, sampled, strict=True) for ids in some
        ]
        scored = score(model, *zip(*flat, strict=True), 4096)
    error = np.concatenate([scored[k] - seen[id(ids)] for k, ids in enumerate(ids for some in sampled for ids in some)])
    if autocast:  # bfloat16 now and then errs by more
        assert np.quantile(np.abs(error), 0.99) < 0.3 and np.abs(error).mean() < 0.03
    else:
        assert np.abs(error).max() < 1e-4 and np.abs(error).mean() < 1e-6


def planned(lengths: Iterable[int]):
    """Responses end after these numbers of tokens, in the order in which they are begun."""
    lengths, ends = iter(lengths), {}

    def ended(ids: list[int]) -> bool:
        if len(ids) == 1:
            ends[id(ids)] = next(lengths)
        return len(ids) == ends[id(ids)]

    return ended


def test_nothing_waits_and_a_prompt_is_computed_once(monkeypatch):
    model, computed = make("Llama"), []
    forward = model.forward

    @wraps(forward)
    def count(input_ids, **given):
        computed.append(input_ids.shape)
        return forward(input_ids, **given)

    monkeypatch.setattr(model, "forward", count)
    prompts, n, rows = [[2, 3, 4]] * 20, 16, 16
    lengths = np.random.default_rng(0).lognormal(2.5, 0.8, 320).clip(1, 60).astype(int)
    sampled = run(model, prompts, n, rows, ended=planned(lengths))
    prefills, steps = ([shape for shape in computed if (shape[1] > 1) == first] for first in (True, False))
    assert sum(count * width for count, width in prefills) == sum(map(len, prompts))
    assert [len(ids) for some in sampled for ids in some] == lengths.tolist()
    done = sum(count for count, _ in steps)
    # the first token comes with the prompt; only at the very end, when nothing is left to begin, up to a quarter idles
    assert (lengths - 1).sum() <= done < 1.1 * (lengths - 1).sum()


def test_a_row_that_nobody_takes_stays_within_the_models_positions():
    model, prompt = make("GPT2", max_position_embeddings=len(PROMPTS[2]) + LONGEST - 1), PROMPTS[2]
    lengths = [LONGEST - 1] + [10] * 4 + [LONGEST] * 4  # the first row idles while those taken later go on
    (sampled,) = run(model, [prompt], 9, 5, ended=planned(lengths))
    assert [len(ids) for ids in sampled] == lengths


def test_every_prompt_gets_its_responses_in_the_order_they_were_begun():
    model, n = make("Llama", initializer_range=0.02), 300
    torch.manual_seed(0)
    sampled = run(model, PROMPTS[:2], n, n, lambda logits_RV: sample_tokens(logits_RV, 1.0, 0, 1.0))
    for responses in sampled:
        length = np.array([len(ids) for ids in responses])
        assert len(length) == n and length.std() > 5 and all(map(ended, responses))
        assert abs(np.corrcoef(length, np.arange(n))[0, 1]) < 4 / np.sqrt(n)


def test_an_interruption_returns_what_is_there():
    model = make("Llama")
    whole = run(model, PROMPTS, 2, 4)
    for after in (0, 1, 9, 30):
        asked = iter(range(10**6))
        cut = run(model, PROMPTS, 2, 4, interrupted=lambda asked=asked, after=after: next(asked) >= after)
        assert [len(responses) for responses in cut] <= [2] * len(cut)
        assert sum(map(len, cut)) == 0 if after == 0 else sum(map(len, cut)) >= 4
        for responses, complete in zip(cut, whole, strict=True):
            assert all(ids == complete[0][: len(ids)] for ids in responses)
        assert after < 9 or any(ended(ids) for responses in cut for ids in responses)
    assert any(not ended(ids) for responses in cut for ids in responses)


def test_other_memories_than_keys_and_values_are_left_to_transformers():
    config = transformers.MambaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4, initializer_range=0.5
    )
    torch.manual_seed(0)
    model, prompts = transformers.AutoModelForCausalLM.from_config(config).eval(), [PROMPTS[0], PROMPTS[3][:1] * 7]
    with pytest.warns(UserWarning, match="MambaForCausalLM keeps more than keys and values"):
        assert run(model, prompts, 2, 3) == [[alone(model, prompt)] * 2 for prompt in prompts]


def test_samplers_with_other_rows_sample_all(tmp_path):
    model, tokenizer = load(tmp_path)
    for rows, stop in product((1, 5, 64), ([], ["1", "+3"])):
        sampled = LocalSampler(rows).sample(model, tokenizer, [[5, 6, 7], [8]], 9, Sampling(1.0, 0, 1.0, 6, stop), 0)
        assert [len(responses) for responses in sampled] == [9, 9]
    assert LocalSampler(4).sample(model, tokenizer, [], 9, Sampling(), 0) == []
