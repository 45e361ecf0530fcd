"""Rows that are refilled compute what a response alone would, sample from the same distribution, and never wait."""

from collections.abc import Iterable
from functools import wraps
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import make_policy

from topr.batching import pack
from topr.policy import LoRA, Policy, load_policy, score
from topr.policy.model import check_forward
from topr.reproduce.making import make_tokenizer
from topr.sampling import LocalSampler, Sampling, local
from topr.sampling.local import Rows

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.4,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 5,
}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}
EXPERTS = {"experts_implementation": "eager"}  # the default has no float64
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
    "Phi3": {"sliding_window": 5},
    "Olmo2": {},
    "SmolLM3": {"no_rope_layers": [1, 1, 0]},
    "Qwen2Moe": {
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_experts": 8,
    }
    | EXPERTS,
    "Mixtral": {"num_local_experts": 4, "sliding_window": None} | EXPERTS,
    "Olmoe": {"num_experts": 10} | EXPERTS,
    "Bloom": {"num_hidden_layers": 6},
    "Falcon": {"parallel_attn": False},
}
FAST = (
    "Llama",
    "Mistral",
    "Gemma2",
    "GPT2",
)  # plain, windows in all layers and in some, learned positions
SLOW = [pytest.mark.slow]
PROMPTS = [
    np.random.default_rng(i).integers(2, 40, length).tolist()
    for i, length in enumerate((7, 1, 12, 3, 12, 5, 2))
]
LONGEST, ENDS = 40, [1, 14, 27]
GREEDY, PLAIN = (Sampling(temperature, 0, 1.0, LONGEST) for temperature in (0.0, 1.0))


def make(family: str, ends: list[int] = ENDS, **changes) -> Policy:
    torch.manual_seed(0)
    known = SIZES | FAMILIES.get(family, {}) | changes
    if family == "Falcon":  # it derives this
        del known["head_dim"]
    config = getattr(transformers, f"{family}Config")(**known)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = ends
    policy = Policy(model, make_tokenizer(), family)
    if family != "Mamba":
        check_forward(policy)  # registers our attention, which every loaded policy has
    # a softmax in float32 turns the masks of float64 into NaN
    return policy if family in ("Bloom", "Gemma2", "Mamba") else policy.double()


def sample(policy: Policy, prompts, n, rows, sampling=GREEDY, seed=0) -> list[list[list[int]]]:
    sampled = LocalSampler(rows).sample(policy, prompts, n, sampling, seed)
    return [[response.ids for response in responses] for responses in sampled]


def ended(ids: list[int]) -> bool:
    return ids[-1] in ENDS or len(ids) == LONGEST


def alone(policy: Policy, prompt: list[int]) -> list[int]:
    """transformers' greedy response to one prompt."""
    config = transformers.GenerationConfig(max_new_tokens=LONGEST, do_sample=False)
    ids = policy.model.generate(torch.tensor([prompt]), generation_config=config)[
        0, len(prompt) :
    ].tolist()
    return ids[: next(k for k in range(1, LONGEST + 1) if ended(ids[:k]))]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in FAST else SLOW) for name in FAMILIES]
)
def test_greedy_responses_equal_those_of_each_prompt_alone(family, monkeypatch):
    policy, resized, resize = make(family), [], Rows._resize
    monkeypatch.setattr(
        Rows,
        "_resize",
        lambda self, rows: (resized.append((len(rows), len(self.starts))), resize(self, rows)),
    )
    expected = [[alone(policy, prompt)] * 2 for prompt in PROMPTS]
    lengths = {len(ids) for ids, *_ in expected}
    assert len(lengths) > 3 and max(lengths) > 15, lengths  # ragged, past every window
    for rows in (3, 8, 30):
        assert sample(policy, PROMPTS, 2, rows) == expected, rows
    assert any(left == before for left, before in resized if left < 8)  # at the end of the buffers
    assert any(left < before for left, before in resized)  # a batch that shrinks


def exact(policy: Policy, prompt: list[int], sampling: Sampling) -> dict[tuple, float]:
    """The probability of each response, from whole forwards and with the tokens' ranks sorted in numpy."""
    shares: dict[tuple, float] = {}

    def follow(ids: tuple, share: float) -> None:
        if ids and (ids[-1] == 1 or len(ids) == sampling.max_new_tokens):
            shares[ids] = share
            return
        with torch.no_grad():
            logits = policy.logits(torch.tensor([prompt + list(ids)]))[0, -1].numpy()
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
    "parameters",
    [(1.0, 0, 1.0), (1.5, 4, 0.9)]
    + [pytest.param(p, marks=SLOW) for p in ((0.7, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.8))],
    ids=str,
)
def test_samples_follow_the_exact_distribution(parameters):
    policy, n, sampling = (
        make("Llama", ends=[1], vocab_size=6, initializer_range=0.2),
        2000,
        Sampling(*parameters, 3),
    )
    prompts = [[2, 3, 4, 5], [3]]
    for prompt, responses in zip(
        prompts, sample(policy, prompts, n, 57, sampling, seed=1), strict=True
    ):
        assert len(responses) == n
        shares = exact(policy, prompt, sampling)
        assert sum(shares.values()) == pytest.approx(1)
        counts = dict.fromkeys(shares, 0)
        for ids in responses:
            counts[tuple(ids)] += 1  # a response of no probability is an error
        common = [ids for ids, share in shares.items() if share * n >= 5]
        statistic = sum((counts[ids] - n * shares[ids]) ** 2 / (n * shares[ids]) for ids in common)
        assert len(common) > 3 and statistic < len(common) + 5 * np.sqrt(2 * len(common))


@pytest.mark.parametrize(
    "lora, autocast",
    [
        (False, False),
        (False, True),
        pytest.param(True, False, marks=SLOW),
        pytest.param(True, True, marks=SLOW),
    ],
)
def test_log_probs_seen_in_sampling_are_those_scored(tmp_path, monkeypatch, lora, autocast):
    policy = load_policy(str(make_policy(tmp_path / "base", scale=0.5)))
    if lora:
        LoRA(rank=2).add_to(policy)
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    seen: dict[int, list[float]] = {}
    append = Rows.append

    def record(self, logits_RV, rows):
        extended = [self.drafts[row] for row in rows]
        append(self, logits_RV, rows)
        for draft, log_probs_V in zip(extended, logits_RV.float().log_softmax(-1), strict=True):
            if draft is not None:
                seen.setdefault(id(draft.ids), []).append(log_probs_V[draft.ids[-1]].item())

    monkeypatch.setattr(Rows, "append", record)
    prompts = [[5, 6], [7], [8, 9, 10, 11, 12]]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        pairs = [
            (np.array(prompt), ids)
            for prompt, some in zip(prompts, sample(policy, prompts, 20, 7, PLAIN), strict=True)
            for ids in some
        ]
        scored = score(
            policy, [prompt for prompt, _ in pairs], [np.array(ids) for _, ids in pairs], 4096
        )
    assert len(pairs) == 60
    error = np.concatenate([scored[k] - seen[id(ids)] for k, (_, ids) in enumerate(pairs)])
    if autocast:  # bfloat16 now and then errs by more
        assert np.quantile(np.abs(error), 0.99) < 0.3 and np.abs(error).mean() < 0.03
    else:
        assert np.abs(error).max() < 1e-4 and np.abs(error).mean() < 1e-6


def test_under_autocast_keys_and_values_are_kept_in_bfloat16(policy, monkeypatch):
    kept, step = set(), Rows.step

    def watch(self):
        kept.update(
            tensor.dtype for layer in self.cache.layers for tensor in (layer.keys, layer.values)
        )
        return step(self)

    monkeypatch.setattr(Rows, "step", watch)
    loaded = load_policy(str(policy))
    with torch.autocast("cpu", torch.bfloat16):
        sample(loaded, [[5, 6], [7]], 3, 2, PLAIN)
    assert kept == {torch.bfloat16}


def planned(monkeypatch, lengths: Iterable[int]) -> None:
    """Make responses end after these numbers of tokens, in the order of their starts."""
    lengths, ends = iter(lengths), {}

    def ended(ids: list[int]) -> bool:
        if len(ids) == 1:
            ends[id(ids)] = next(lengths)
        return len(ids) == ends[id(ids)]

    monkeypatch.setattr(local, "end_of_response", lambda policy, sampling: ended)


def test_no_row_waits_and_a_prompt_is_computed_once(monkeypatch):
    policy, computed = make("Llama"), []
    forward = policy.model.forward

    @wraps(forward)
    def count(input_ids, **keywords):
        computed.append(input_ids.shape)
        return forward(input_ids, **keywords)

    monkeypatch.setattr(policy.model, "forward", count)
    prompts, n, rows = [[2, 3, 4]] * 20, 16, 16
    lengths = np.random.default_rng(0).lognormal(2.0, 0.8, 320).clip(1, 40).astype(int)
    planned(monkeypatch, lengths)
    sampled = sample(policy, prompts, n, rows)
    prefills, steps = (
        [shape for shape in computed if (shape[1] > 1) == first] for first in (True, False)
    )
    assert sum(count * width for count, width in prefills) == sum(map(len, prompts))
    assert [len(ids) for some in sampled for ids in some] == lengths.tolist()
    done = sum(count for count, _ in steps)
    # the first token comes with the prompt; rows are idle only at the very end, and at most a quarter of them
    assert (lengths - 1).sum() <= done < 1.1 * (lengths - 1).sum()


def test_a_free_row_stays_within_the_models_positions(monkeypatch):
    policy, prompt = make("GPT2", max_position_embeddings=len(PROMPTS[2]) + LONGEST - 1), PROMPTS[2]
    lengths = (
        [LONGEST - 1] + [10] * 4 + [LONGEST] * 4
    )  # the first row is idle while later ones continue
    planned(monkeypatch, lengths)
    (sampled,) = sample(policy, [prompt], 9, 5)
    assert [len(ids) for ids in sampled] == lengths


def test_a_response_depends_on_its_seed_prompt_and_place_alone():
    policy, prompts = make("Llama", initializer_range=0.02), PROMPTS[:4]
    whole = sample(policy, prompts, 5, 512, PLAIN)
    assert len({tuple(ids) for responses in whole for ids in responses}) > 15
    assert all(sample(policy, prompts, 5, rows, PLAIN) == whole for rows in (1, 3, 7))
    assert [responses[:2] for responses in whole] == sample(policy, prompts, 2, 4, PLAIN)
    parts = [
        LocalSampler().sample(policy, prompts[i::2], 5, PLAIN, 0, range(i, 4, 2)) for i in (0, 1)
    ]
    assert [[response.ids for response in parts[i % 2][i // 2]] for i in range(4)] == whole


def test_as_many_rows_as_fit_into_free_memory(monkeypatch):
    policy, sizes = make("Llama"), []
    prefill = Rows.prefill
    monkeypatch.setattr(
        Rows, "prefill", lambda self, jobs: (prefill(self, jobs), sizes.append(len(self.drafts)))[0]
    )
    whole = sample(policy, PROMPTS, 3, None, PLAIN)
    # 3 layers, keys and values, 2 heads of 8 numbers of 8 bytes, of a prompt of 12 and a response of 40 tokens; scores
    row = 3 * 2 * 2 * 8 * 8 * 1.25 * (12 + LONGEST) + 16 * 40
    for share, rows in ((1e9, 21), (5.5, 5), (0.0, 1)):
        sizes.clear()
        monkeypatch.setattr(local, "free_memory", lambda device, share=share: share * row / 0.8)
        assert sample(policy, PROMPTS, 3, None, PLAIN) == whole and sizes[0] == rows
    assert sample(policy, PROMPTS, 3, 4, PLAIN) == whole and sizes[-1] <= 4


def test_neither_sampling_nor_padded_rows_use_cudnn(tmp_path, monkeypatch):
    seen, attend = [], torch.nn.functional.scaled_dot_product_attention

    def record(*arguments, **keywords):
        cuda = torch.backends.cuda
        seen.append(
            (cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled())
        )
        return attend(*arguments, **keywords)

    torch.backends.cuda.enable_cudnn_sdp(True)
    policy = load_policy(str(make_policy(tmp_path / "base")))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    sample(policy, [[5, 6], [7]], 2, 4)
    sampled = len(seen)
    policy.model.set_attn_implementation("sdpa")
    policy.model.activation_checkpointing_enable({"use_reentrant": False})
    policy.train()
    log_probs_N, _ = policy(pack([np.array([5, 6])], [np.array([7, 8])]))
    forward = len(seen)
    log_probs_N.sum().backward()
    assert 0 < sampled < forward < len(seen)  # the backward recomputes
    assert set(seen) == {(False, True, True)}


def test_responses_are_in_the_order_of_their_starts_whatever_their_lengths():
    policy, n = make("Llama", initializer_range=0.02), 300
    for responses in sample(policy, PROMPTS[:2], n, n, PLAIN):
        length = np.array([len(ids) for ids in responses])
        assert len(length) == n and length.std() > 5 and all(map(ended, responses))
        assert abs(np.corrcoef(length, np.arange(n))[0, 1]) < 4 / np.sqrt(n)


def test_a_requested_stop_returns_the_responses_so_far(monkeypatch):
    policy = make("Llama")
    whole = sample(policy, PROMPTS, 2, 4)
    for after in (0, 1, 9, 30):
        asked = iter(range(10**6))
        requested = SimpleNamespace(is_set=lambda asked=asked, after=after: next(asked) >= after)
        monkeypatch.setattr(local, "stop_requested", requested)
        cut = sample(policy, PROMPTS, 2, 4)
        assert [len(responses) for responses in cut] <= [2] * len(cut)
        assert sum(map(len, cut)) == 0 if after == 0 else sum(map(len, cut)) >= 4
        for responses, complete in zip(cut, whole, strict=True):
            assert all(ids == complete[0][: len(ids)] for ids in responses)
        assert after < 9 or any(ended(ids) for responses in cut for ids in responses)
    assert any(not ended(ids) for responses in cut for ids in responses)


def test_models_with_other_caches_use_transformers(monkeypatch):
    policy = make("Mamba", hidden_size=16, num_hidden_layers=2, state_size=4, initializer_range=0.5)
    policy.model.generation_config.suppress_tokens = [2]
    prompts = [PROMPTS[0], PROMPTS[3][:1] * 7]
    with pytest.warns(UserWarning, match="MambaForCausalLM caches more than keys and values"):
        sampled = sample(policy, prompts, 2, 3)
    assert policy.model.generation_config.suppress_tokens == [2]
    policy.model.generation_config.suppress_tokens = None
    assert sampled == [[alone(policy, prompt)] * 2 for prompt in prompts]
    monkeypatch.setattr(local, "stop_requested", SimpleNamespace(is_set=lambda: True))
    with pytest.warns(UserWarning):
        assert sample(policy, prompts, 2, 3) == [[], []]
