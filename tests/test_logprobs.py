"""Log-probs and shared prompts, against one naive forward for each trajectory."""

from importlib import reload

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import score
from torch import Tensor
from torch.nn.attention import varlen

from topr.batching import pack
from topr.io import InputError
from topr.policy import Policy, export_policy, flash, load_policy, load_tokenizer, logprobs
from topr.policy.files import vocabulary_and_context
from topr.policy.logprobs import TokenLogProbs, padded_hidden_states, token_log_probs
from topr.policy.model import choose_forward
from topr.policy.shared_prompts import attend

SMALL = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "head_dim": 8,
}
# the default has no float64; a loaded policy takes the default
EXPERTS = {"experts_implementation": "eager"}
FAMILIES = {  # with grouped queries where a family has them, and windows shorter than the sequences
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "Qwen3": {},
    "Mistral": {"sliding_window": 5},
    "Gemma3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "Phi3": {"sliding_window": 6},
    "GPTNeoX": {},
    "GPT2": {
        "n_positions": 64,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
        "resid_pdrop": 0,
    },
    "OPT": {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
    "Olmo2": {},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Qwen2Moe": {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 6}
    | EXPERTS,
    "Mixtral": {"num_local_experts": 4} | EXPERTS,
    "Olmoe": {"num_experts": 10, "head_dim": 4} | EXPERTS,
}
# their attention is not one that we replace
PADDED = {
    "Gemma2": {"sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Bloom": {"n_head": 2},
    "Falcon": {},
    "Mamba": {"state_size": 4},
}


def make_policy_of(family: str, **changes) -> Policy:
    torch.manual_seed(0)
    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")
    arguments = SMALL | (FAMILIES | PADDED)[family] | changes
    if family == "Falcon":  # derived
        del arguments["head_dim"]
    causal = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, causal)(config(**arguments)).train()
    for parameter in model.parameters():  # norms and biases too: what is 0 or 1 hides mistakes
        torch.nn.init.normal_(parameter, parameter.mean().item(), 0.2)
    return Policy(model, None, family)


def naive(policy: Policy, prompts: list, responses: list) -> Tensor:
    """log pi of response tokens from the model's own logits, one sequence at a time, no padding."""
    found = []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.from_numpy(np.concatenate((prompt, response)))
        log_probs = policy.logits(ids[None])[0].double().log_softmax(-1)
        for place in range(len(prompt), len(ids)):
            found.append(log_probs[place - 1, ids[place]])
    return torch.stack(found)


def sequences(count: int = 7) -> tuple[list, list]:
    """Prompts, some of them shared by neighbours, and responses."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 20, rng.integers(1, 9)) for _ in range(count)]
    responses = [rng.integers(3, 20, rng.integers(1, 15)) for _ in range(count)]
    return [prompts[i - i % 3] for i in range(count)], responses


def gradients(value: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of a sum with uneven weights."""
    weight = torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view(value.shape)
    return torch.autograd.grad((weight * value).sum(), inputs, retain_graph=True)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, *PADDED])
def test_a_row_of_trajectories_equals_one_forward_for_each(family, checkpointing):
    policy = make_policy_of(family).double()
    plain = make_policy_of(family).double()
    plain.model.set_attn_implementation("eager")
    if family in PADDED:
        with pytest.warns(match="trajectories are padded"):
            choose_forward(policy)
    else:
        choose_forward(policy)
    assert policy.padded == (family in PADDED)
    if checkpointing:
        policy.model.activation_checkpointing_enable({"use_reentrant": False})
    prompts, responses = sequences()
    tokens = pack(prompts, responses)
    found = policy.log_probs(tokens)
    expected = naive(plain, prompts, responses)
    # the models' own norms are float32
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    padded = padded_hidden_states(policy.model, tokens)
    log_probs_N = token_log_probs(policy.model, padded, tokens.target_N)
    torch.testing.assert_close(found, log_probs_N, rtol=0, atol=2e-6)
    mine = gradients(found, list(policy.parameters()))
    theirs = gradients(expected, list(plain.parameters()))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padded", [True, False])
def test_tokens_that_were_not_sampled_are_context_alone(padded):
    policy = make_policy_of("Llama").double()
    if not padded:
        choose_forward(policy)
    prompts, responses = sequences()
    rng = np.random.default_rng(2)
    sampled = []
    for ids in responses:
        mask = rng.random(len(ids)) < 0.5
        mask[0] = True
        sampled.append(mask)
    kept = torch.from_numpy(np.concatenate([np.full(len(responses[0]), True), *sampled[1:]]))
    expected = policy.log_probs(pack(prompts, responses))[kept]
    found = policy.log_probs(pack(prompts, responses, [None, *sampled[1:]]))
    assert len(found) < len(kept)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_model_that_ignores_the_window_in_its_config_is_padded():
    policy = make_policy_of("Llama")
    policy.model.config.sliding_window = 4
    with pytest.warns(match="trajectories are padded"):
        choose_forward(policy)
    assert policy.padded


def test_a_model_that_scales_its_logits_is_rejected():
    policy = make_policy_of("Llama")
    choose_forward(policy)
    policy.model.lm_head.register_forward_hook(lambda module, inputs, logits: 0.5 * logits)
    with pytest.raises(InputError, match="does more to its logits"):
        choose_forward(policy)


def small_chunks(monkeypatch):
    """Chunks of 64 positions."""
    monkeypatch.setitem(logprobs.POSITIONS, "cpu", 64)
    monkeypatch.setattr(logprobs, "FEW_LOGITS", 0)


@pytest.mark.parametrize("positions", [1, 63, 64, 65, 128, 150])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_chunked_head_equals_the_naive_one(monkeypatch, positions, softcap):
    small_chunks(monkeypatch)
    torch.manual_seed(0)
    hidden = torch.randn(positions, 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(37, 12, dtype=torch.float64, requires_grad=True)
    target = torch.randint(37, (positions,))
    logits = F.linear(hidden, weight)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
    found = TokenLogProbs.apply(hidden, weight, softcap, target)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    inputs = [hidden, weight]
    mine = gradients(found, inputs)
    torch.testing.assert_close(mine, gradients(expected, inputs), rtol=0, atol=1e-10)


def test_a_frozen_projection_gets_no_gradient():
    policy = make_policy_of("Llama")
    policy.model.lm_head.weight.requires_grad_(False)
    policy.log_probs(pack(*sequences())).sum().backward()
    assert policy.model.lm_head.weight.grad is None
    assert policy.model.model.norm.weight.grad.abs().sum() > 0


def test_micro_batches_add_their_gradients():
    policy = make_policy_of("Llama").double()
    choose_forward(policy)
    prompts, responses = sequences()
    policy.log_probs(pack(prompts, responses)).sum().backward()
    expected = policy.model.lm_head.weight.grad
    policy.zero_grad()
    for part in (slice(0, 3), slice(3, None)):
        policy.log_probs(pack(prompts[part], responses[part])).sum().backward()
    torch.testing.assert_close(policy.model.lm_head.weight.grad, expected, rtol=0, atol=1e-6)


def test_autocast_leaves_the_projection_in_float32(policy, monkeypatch):
    small_chunks(monkeypatch)  # with one that is computed again
    policy = load_policy(str(policy))
    torch.manual_seed(0)
    hidden = torch.randn(100, 16, requires_grad=True)
    target = torch.randint(20, (100,))
    exact = token_log_probs(policy.model, hidden, target)
    inputs = [hidden, policy.model.lm_head.weight]
    expected = gradients(exact, inputs)
    with torch.autocast("cpu", torch.bfloat16):  # the backward runs inside it as well
        found = token_log_probs(policy.model, hidden, target)
        torch.testing.assert_close(found, exact, rtol=0, atol=0)
        torch.testing.assert_close(gradients(found, inputs), expected, rtol=0, atol=1e-6)
        rounded = token_log_probs(policy.model, hidden.bfloat16(), target)
    assert rounded.dtype == torch.float32


def test_autocast_leaves_attention_over_spans_in_float32():
    spans = pack(*sequences()).spans
    length = spans[-1][1]
    torch.manual_seed(0)
    given = [torch.randn(1, heads, length, 8, requires_grad=True) for heads in (4, 2, 2)]
    exact, _ = attend(None, *given, None, scaling=0.3, spans=spans)
    expected = gradients(exact, given)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = attend(None, *given, None, scaling=0.3, spans=spans)
        torch.testing.assert_close(found, exact, rtol=0, atol=0)
        torch.testing.assert_close(gradients(found, given), expected, rtol=0, atol=1e-6)


def test_a_whole_policy_under_autocast_rounds_hidden_states_alone(policy):
    policy = load_policy(str(policy))
    tokens = pack(*sequences())
    exact = policy.log_probs(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        found = policy.log_probs(tokens)
    assert found.dtype == torch.float32
    assert 0 < (found - exact).abs().max() < 0.1


def varlen_attn(
    query, key, value, query_ends, key_ends, *longest, scale, window_size, enable_gqa=False
):
    """What the kernel of a GPU promises: causal, the last query of a sequence sees the last key."""
    assert longest == (query_ends.diff().max(), key_ends.diff().max())
    outs = []
    for i in range(len(query_ends) - 1):
        queries = query[query_ends[i] : query_ends[i + 1]].transpose(0, 1)
        keys = key[key_ends[i] : key_ends[i + 1]].transpose(0, 1)
        values = value[key_ends[i] : key_ends[i + 1]].transpose(0, 1)
        own, all_keys = queries.shape[1], keys.shape[1]
        distance = torch.arange(all_keys - own, all_keys)[:, None] - torch.arange(all_keys)
        seen = distance >= 0
        if window_size[0] >= 0:
            seen &= distance <= window_size[0]
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        outs.append(out)
    return torch.cat(outs, dim=1).transpose(0, 1)


def varlen_attn_of_torch_2_11(
    query, key, value, query_ends, key_ends, max_q, max_k, *, scale, window_size
):
    """It has no word for grouped heads, and takes them."""
    given = (query, key, value, query_ends, key_ends, max_q, max_k)
    return varlen_attn(*given, scale=scale, window_size=window_size, enable_gqa=True)


@pytest.fixture(params=[varlen_attn, varlen_attn_of_torch_2_11])
def kernel(request, monkeypatch):
    """A kernel in place of torch's, whose arguments `flash` looks at when it is loaded."""
    with monkeypatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", request.param)
        reload(flash)
        yield
    reload(flash)


@pytest.mark.parametrize("window", [None, 4])
def test_flash_attention_over_sequences_attends_as_the_row_does(monkeypatch, kernel, window):
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float64)
    spans = pack(*sequences()).spans
    length = spans[-1][1]
    torch.manual_seed(0)
    given = [
        torch.randn(1, heads, length, 8, dtype=torch.float64, requires_grad=True)
        for heads in (6, 3, 3)
    ]
    row, _ = attend(None, *given, None, scaling=0.3, sliding_window=window, spans=spans)
    rows = [tensor[0].transpose(0, 1) for tensor in given]
    found = flash.attention(*rows, spans, window, 0.3)[None]
    torch.testing.assert_close(found, row, rtol=0, atol=1e-12)
    mine = gradients(found, given)
    torch.testing.assert_close(mine, gradients(row, given), rtol=0, atol=1e-12)


def test_score_keeps_the_order_and_equals_the_training_forward(policy):
    policy = load_policy(str(policy))
    prompts, responses = sequences(count=23)
    order = np.random.default_rng(0).permutation(23)  # equal prompts no longer side by side
    prompts = [prompts[i] for i in order]
    responses = [responses[i] for i in order]
    together = policy.log_probs(pack(prompts, responses)).detach()
    for tokens in (40, 100, 10_000):
        scores = score(policy, prompts, responses, tokens)
        assert list(map(len, scores)) == list(map(len, responses))
        np.testing.assert_allclose(np.concatenate(scores), together, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("family", "noise"),
    [
        ("GPT2", ["embd_pdrop", "attn_pdrop", "resid_pdrop"]),
        ("OPT", ["dropout"]),
        ("OPT", ["layerdrop"]),
        ("Mixtral", ["router_jitter_noise"]),
    ],
    ids=str,
)
def test_dropout_and_other_noise_are_off_in_training_mode(policy, tmp_path, family, noise):
    noisy = make_policy_of(family, **dict.fromkeys(noise, 0.5))
    noisy.tokenizer = load_tokenizer(str(policy))
    export_policy(noisy, tmp_path / "noisy")
    loaded = load_policy(str(tmp_path / "noisy")).train()
    tokens = pack(*sequences())
    # half of the time, one layer of two is kept
    assert len({noisy.log_probs(tokens).sum().item() for _ in range(20)}) > 1
    assert len({loaded.log_probs(tokens).sum().item() for _ in range(20)}) == 1


def test_longrope_ends_at_the_original_length(tmp_path):
    """Beyond it, a trajectory's log-probs would depend on the longest one in its row."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 2, "long_factor": [4.0] * 2}
    more = {"original_max_position_embeddings": 16, "head_dim": 4}
    policy = make_policy_of("Phi3", rope_parameters=rope, **more)
    policy.model.config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert vocabulary_and_context(str(tmp_path))[1] == 16

    def log_probs(*lengths):
        tokens = pack([np.array([5])] * len(lengths), [np.arange(3, 3 + n) for n in lengths])
        return policy.log_probs(tokens)

    within = log_probs(10, 15)[:10] - log_probs(10)
    beyond = log_probs(10, 16)[:10] - log_probs(10)
    assert within.abs().max() < 1e-5 < 1e-2 < beyond.abs().max()
