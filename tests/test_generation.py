"""Refilled rows compute what a response alone would, follow its distribution, and never wait."""

import numpy as np
import pytest
import torch
import transformers
from conftest import make_policy, make_tokenizer, score, slow

from topr.io import InputError
from topr.io.distributed import stop_requested
from topr.policy import Policy, export_policy, load_policy
from topr.sampling import LocalSampler, Sampling, local
from topr.sampling.local import Draft, Rows, sample_tokens

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "initializer_range": 0.4,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS = {"layer_types": LAYERS, "sliding_window": 5}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}
QWEN_EXPERTS = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
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
    "Qwen2Moe": QWEN_EXPERTS | {"num_experts": 8},
    "Mixtral": {"num_local_experts": 4, "sliding_window": None},
    "Olmoe": {"num_experts": 10},
    "Bloom": {"num_hidden_layers": 6},
    "Falcon": {"parallel_attn": False, "head_dim": None},
}
FAST = ("Llama", "Mistral", "Gemma2", "GPT2")  # plain, windows in all or some layers, positions
PROMPTS = []
for i, length in enumerate((7, 1, 12, 3, 12, 5, 2)):
    PROMPTS.append(np.random.default_rng(i).integers(2, 40, length).tolist())
LONGEST = 40
ENDS = [1, 14, 27]
GREEDY = Sampling(0.0, 0, 1.0, LONGEST)
PLAIN = Sampling(1.0, 0, 1.0, LONGEST)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Load a random policy of a family, in float64 where its attention allows it."""
    monkeypatch.setattr(local, "PREFILL", 20)  # one or a few prompts

    def make(family: str, ends: list[int] = ENDS, **changes) -> Policy:
        torch.manual_seed(0)
        settings = SIZES | FAMILIES.get(family, {}) | changes
        if settings["head_dim"] is None:  # Falcon derives it
            del settings["head_dim"]
        config = getattr(transformers, f"{family}Config")(**settings)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.generation_config.eos_token_id = ends
        export_policy(Policy(model, make_tokenizer(), family), tmp_path / family)
        policy = load_policy(str(tmp_path / family)).eval()
        if family in ("Qwen2Moe", "Mixtral", "Olmoe"):
            policy.model.set_experts_implementation("eager")  # the default has no float64
        # A softmax in float32 turns the masks of float64 into NaN.
        return policy if family in ("Bloom", "Gemma2", "Mamba") else policy.double()

    return make


def sample(policy: Policy, prompts, n, rows, sampling=GREEDY, seed=0) -> list[list[list[int]]]:
    found = []
    for responses in LocalSampler(rows).sample(policy, prompts, n, sampling, seed):
        found.append([response.ids for response in responses])
    return found


def alone(policy: Policy, prompt: list[int]) -> list[int]:
    """transformers' greedy response to one prompt."""
    config = transformers.GenerationConfig(max_new_tokens=LONGEST, do_sample=False)
    output = policy.model.generate(torch.tensor([prompt]), generation_config=config)
    ids = output[0, len(prompt) :].tolist()
    ends = [place for place, token in enumerate(ids) if token in ENDS]
    return ids[: ends[0] + 1] if ends else ids


@pytest.mark.filterwarnings("ignore:.*trajectories are padded")
@pytest.mark.parametrize("family", [*FAST, *(slow(name) for name in FAMILIES if name not in FAST)])
def test_greedy_responses_equal_those_of_each_prompt_alone(make, family):
    policy = make(family)
    expected = [[alone(policy, prompt)] * 2 for prompt in PROMPTS]
    lengths = {len(ids) for ids, _ in expected}
    assert len(lengths) > 3 and max(lengths) > 15, lengths  # ragged, past every window
    for rows in (3, 8, 30):
        assert sample(policy, PROMPTS, 2, rows) == expected, rows


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (1.5, 4, 0.9), (0.7, 0, 0.8), (1.0, 99, 1.0)]
)
def test_tokens_are_drawn_with_the_exact_probabilities(temperature, top_k, top_p):
    n = 20_000
    draw_R = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    for seed in range(5):
        logits_V = np.random.default_rng(seed).normal(size=9)
        scores_V = np.exp(logits_V / temperature)
        likeliest = np.argsort(-scores_V)[: top_k or None]
        sums = np.cumsum(scores_V[likeliest] / scores_V[likeliest].sum())
        kept = likeliest[: 1 + int((sums < top_p).sum())]
        expected_V = np.zeros(9)
        expected_V[kept] = scores_V[kept] / scores_V[kept].sum()
        sampling = Sampling(temperature, top_k, top_p)
        token_R = sample_tokens(torch.tensor(logits_V).expand(n, 9), draw_R, sampling)
        found_V = np.bincount(token_R, minlength=9) / n
        np.testing.assert_allclose(found_V, expected_V, rtol=0, atol=1.01 / n)


class Watched(Rows):
    """Rows over the drafts of some prompts; keeps the shape of each forward and all log-probs."""

    def __init__(self, policy: Policy, prompts: list[list[int]], n: int, rows: int):
        groups = []
        for index, prompt in enumerate(prompts):
            draws = np.random.default_rng([0, index]).random((n, LONGEST))
            groups.append([Draft(prompt, iter(draws_of_one)) for draws_of_one in draws])
        self.all = sum(groups, [])
        super().__init__(policy, PLAIN, groups, rows)
        self.shapes: list[tuple] = []
        self.log_probs: dict[Draft, list[float]] = {draft: [] for draft in self.all}

    def forward(self, ids_RL, *others):
        self.shapes.append(tuple(ids_RL.shape))
        return super().forward(ids_RL, *others)

    def append(self, drafts, logits_RV):
        before = [len(draft.ids) for draft in drafts]
        super().append(drafts, logits_RV)
        log_probs_RV = logits_RV.float().log_softmax(-1)
        for row, draft in enumerate(drafts):
            if len(draft.ids) > before[row]:
                self.log_probs[draft].append(log_probs_RV[row, draft.ids[-1]].item())

    def end_after(self, lengths: list[int]) -> None:
        """Make responses end after these numbers of tokens, in the order of their starts."""
        ends = {id(draft.ids): length for draft, length in zip(self.all, lengths, strict=True)}
        self.is_end = lambda ids: len(ids) == ends[id(ids)]


@pytest.mark.parametrize("autocast", [False, True])
@torch.no_grad()
def test_log_probs_seen_in_sampling_are_those_scored(tmp_path, autocast):
    policy = load_policy(str(make_policy(tmp_path / "base", scale=0.5))).eval()
    rows = Watched(policy, [[5, 6], [7], [8, 9, 10, 11, 12]], 20, 7)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        rows.decode()
        prompts = [draft.prompt for draft in rows.all]
        scored = score(policy, prompts, [draft.ids for draft in rows.all], 4096)
    seen = [rows.log_probs[draft] for draft in rows.all]
    error = np.abs(np.concatenate(scored) - np.concatenate(seen))
    if autocast:  # bfloat16 now and then errs by more
        assert np.quantile(error, 0.99) < 0.3 and error.mean() < 0.03
        assert rows.states[0].dtype == torch.bfloat16
    else:
        assert error.max() < 1e-4 and error.mean() < 1e-6


@torch.no_grad()
def test_no_row_waits_and_a_prompt_is_computed_once(make):
    lengths = np.random.default_rng(0).lognormal(2.0, 0.8, 320).clip(1, LONGEST).astype(int)
    rows = Watched(make("Llama"), [[2, 3, 4]] * 20, 16, 16)
    rows.end_after(lengths)
    rows.decode()
    assert [len(draft.ids) for draft in rows.all] == lengths.tolist()
    assert sum(count for count, width in rows.shapes if width > 1) == 20
    done = sum(count for count, width in rows.shapes if width == 1)
    # The first token comes with the prompt. Rows are idle only at the end, at most a quarter.
    assert (lengths - 1).sum() <= done < 1.1 * (lengths - 1).sum()


@torch.no_grad()
def test_a_free_row_stays_within_the_models_positions(make):
    prompt = PROMPTS[2]
    policy = make("GPT2", max_position_embeddings=len(prompt) + LONGEST - 1)
    rows = Watched(policy, [prompt], 9, 5)
    # The first row is idle while later ones continue.
    lengths = [LONGEST - 1] + [10] * 4 + [LONGEST] * 4
    rows.end_after(lengths)
    rows.decode()
    assert [len(draft.ids) for draft in rows.all] == lengths


def test_a_response_depends_on_its_seed_prompt_and_place_alone(make):
    policy, prompts = make("Llama", initializer_range=0.02), PROMPTS[:4]
    whole = sample(policy, prompts, 5, 512, PLAIN)
    assert len({tuple(ids) for responses in whole for ids in responses}) > 15
    for rows in (1, 3, 7):
        assert sample(policy, prompts, 5, rows, PLAIN) == whole
    assert sample(policy, prompts, 2, 4, PLAIN) == [responses[:2] for responses in whole]
    assert sample(policy, prompts, 5, 512, PLAIN, seed=1) != whole
    odd = LocalSampler().sample(policy, prompts[1::2], 5, PLAIN, 0, [1, 3])
    assert [[response.ids for response in responses] for responses in odd] == whole[1::2]


def test_a_requested_stop_returns_the_responses_so_far(make):
    policy = make("Llama")
    whole = sample(policy, PROMPTS[:1], 2, 2, PLAIN)
    rows = Watched(policy, PROMPTS[:1], 2, 2)
    rows.is_end = lambda ids: len(ids) == 9 and stop_requested.set()
    try:
        rows.decode()
        assert sample(policy, PROMPTS, 2, 4) == [[]] * len(PROMPTS)
    finally:
        stop_requested.clear()
    assert [draft.ids for draft in rows.all] == [ids[:9] for ids in whole[0]]


@pytest.mark.parametrize(
    ("family", "changes"), [("Mamba", {"state_size": 4}), ("Lfm2", {"full_attn_idxs": [1]})]
)
def test_a_model_with_another_cache_is_refused(make, family, changes):
    policy = make(family, **changes)
    with pytest.raises(InputError, match="caches more than keys and values; .* on a server"):
        sample(policy, PROMPTS, 1, 3)
