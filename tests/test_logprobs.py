"""Log-probs, prompts computed once and the one-pass loss, against one naive forward for each trajectory."""

import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.nn.attention import varlen

from topr.batching import MicroBatch, Tokens, pack
from topr.io import InputError
from topr.losses import TOPR, Loss
from topr.policy import Policy, export_policy, load_policy, load_tokenizer, score, shared_prompts
from topr.policy.logprobs import (
    CHUNK_LOGITS,
    Head,
    output_head,
    padded_hidden_states,
    token_log_probs,
)
from topr.policy.model import check_forward
from topr.policy.one_pass import OnePass
from topr.policy.shared_prompts import Spans, attend

SMALL = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 1, "head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "experts_implementation": "eager"
}  # the default has no float64; a loaded policy takes the default
FAMILIES = {  # with grouped queries where a family has them, and windows shorter than the sequences
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "Qwen3": {},
    "Mistral": {"sliding_window": 5},
    "Gemma2": {"sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Gemma3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "Phi3": {"sliding_window": 6},
    "GPTNeoX": {},
    "GPT2": {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    | dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0),
    "OPT": {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
    "Olmo2": {},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Qwen2Moe": {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 6}
    | EXPERTS,
    "Mixtral": {"num_local_experts": 4} | EXPERTS,
    "Olmoe": {"num_experts": 10, "head_dim": 4} | EXPERTS,
}
# their attention is not one that we replace
PADDED = {"Bloom": {"n_head": 2}, "Falcon": {}, "Mamba": {"state_size": 4}}


def make_policy_of(family: str, **changes) -> Policy:
    torch.manual_seed(0)
    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")
    known = SMALL | (FAMILIES | PADDED)[family] | changes
    if isinstance(getattr(config, "head_dim", None), property):  # Falcon derives it
        del known["head_dim"]
    causal = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, causal)(config(**known)).train()
    for parameter in model.parameters():  # norms and biases too: what is 0 or 1 hides mistakes
        torch.nn.init.normal_(parameter, parameter.mean().item(), 0.2)
    return Policy(model, None, family)


def naive(policy: Policy, prompt: np.ndarray, response: np.ndarray) -> torch.Tensor:
    """log pi of each response token from the model's own logits, one sequence, no padding."""
    ids = torch.from_numpy(np.concatenate((prompt, response)))
    log_probs = policy.logits(ids[None])[0].double().log_softmax(-1)
    return torch.stack(
        [log_probs[len(prompt) - 1 + t, token] for t, token in enumerate(ids[len(prompt) :])]
    )


def sequences(seed: int = 0, count: int = 7):
    """Prompts, some of them shared by neighbours, and responses."""
    rng = np.random.default_rng(seed)
    draw = lambda low, high: [rng.integers(3, 20, rng.integers(low, high)) for _ in range(count)]  # noqa: E731
    prompts, responses = draw(1, 9), draw(1, 15)
    return [prompts[i - i % 3] for i in range(count)], responses


def gradients(policy: Policy, value: torch.Tensor) -> list[torch.Tensor]:
    return torch.autograd.grad(value, list(policy.parameters()), retain_graph=True)


def one_pass(tokens: Tokens, loss: Loss, ref_log_probs_N, advantage_B, scale_B) -> OnePass:
    count = len(tokens.length_B)
    real_B, divisor = torch.ones(count), torch.tensor(float(count))
    batch = MicroBatch(
        tokens, ref_log_probs_N, advantage_B, advantage_B, real_B, divisor, 1, torch.arange(count)
    )
    return OnePass(loss, batch, scale_B)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, *PADDED])
def test_a_row_of_trajectories_equals_one_forward_for_each(family, checkpointing):
    policy, plain = (make_policy_of(family).double() for _ in range(2))
    plain.model.set_attn_implementation("eager")
    if family in PADDED:
        with pytest.warns(match="trajectories are padded"):
            check_forward(policy)
    else:
        check_forward(policy)
    assert policy.padded == (family not in FAMILIES)
    if checkpointing:
        policy.model.activation_checkpointing_enable({"use_reentrant": False})
    prompts, responses = sequences()
    tokens = pack(prompts, responses)
    log_probs_N, hidden_ND = policy(tokens)
    torch.testing.assert_close(
        padded_hidden_states(policy.model, tokens), hidden_ND, rtol=0, atol=1e-5
    )
    expected = torch.cat([naive(plain, p, r) for p, r in zip(prompts, responses, strict=True)])
    torch.testing.assert_close(
        log_probs_N, expected, rtol=0, atol=2e-6
    )  # the models' own norms are float32
    assert hidden_ND.shape == (len(expected), 16)
    scale = torch.linspace(-1, 1, len(expected), dtype=torch.float64)
    for mine, other in zip(
        gradients(policy, (scale * log_probs_N).sum()),
        gradients(plain, (scale * expected).sum()),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padded", [True, False])
def test_tokens_that_were_not_sampled_are_context_alone(padded):
    policy = make_policy_of("Llama").double()
    if not padded:
        check_forward(policy)
    prompts, responses = sequences()
    rng = np.random.default_rng(2)
    sampled = [
        None,
        *((rng.random(len(ids)) < 0.5) | (np.arange(len(ids)) == 0) for ids in responses[1:]),
    ]
    tokens = pack(prompts, responses, sampled)
    kept = [
        np.full(len(ids), True) if mask is None else mask
        for ids, mask in zip(responses, sampled, strict=True)
    ]
    assert tokens.length_B.tolist() == tokens.lengths == [mask.sum() for mask in kept]
    assert tokens.nominal == sum(map(len, prompts)) + sum(map(len, responses))
    expected = torch.cat(policy(pack(prompts, responses))[0].split(list(map(len, responses))))
    expected = expected[torch.from_numpy(np.concatenate(kept))]
    assert len(expected) < sum(map(len, responses))
    torch.testing.assert_close(policy(tokens)[0], expected, rtol=0, atol=1e-12)


def test_a_model_that_ignores_the_window_in_its_config_is_padded():
    policy = make_policy_of("Llama")
    policy.model.config.sliding_window = 4
    with pytest.warns(match="trajectories are padded"):
        check_forward(policy)
    assert policy.padded


def test_a_model_that_scales_its_logits_is_rejected():
    policy = make_policy_of("Llama")
    check_forward(policy)
    policy.model.lm_head.register_forward_hook(lambda module, inputs, logits: 0.5 * logits)
    with pytest.raises(InputError, match="does more to its logits"):
        check_forward(policy)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPTNeoX"])
@pytest.mark.parametrize(
    "chunk", [2**25, 20 * 64]
)  # every position at once; 64, fewer than the longest response has
def test_one_pass_equals_the_loss_and_gradient_of_two(monkeypatch, family, chunk):
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", chunk)
    policy = make_policy_of(family, max_position_embeddings=256).double()
    check_forward(policy)
    prompts, responses = sequences()
    rng = np.random.default_rng(1)
    responses[2] = rng.integers(3, 20, 150)
    tokens, loss = pack(prompts, responses), TOPR(0.5, 2, 0, 1)
    advantage_B = torch.tensor(rng.choice([-1.0, 0.5, 1.0], len(prompts)))
    scale_B = torch.tensor(rng.random(len(prompts)))
    log_probs_N, hidden_ND = policy(tokens)
    shift_B = (
        torch.tensor(rng.normal(0, 2, len(prompts))) / tokens.length_B
    )  # ratios on both sides of every limit
    ref_log_probs_N = log_probs_N.detach() + shift_B.repeat_interleave(tokens.length_B)
    expected = loss(log_probs_N, ref_log_probs_N, tokens.length_B, advantage_B)
    in_one_pass = one_pass(tokens, loss, ref_log_probs_N, advantage_B, scale_B)
    total, output, again_ND = policy(tokens, in_one_pass)
    for mine, other in zip(output, expected, strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=0, atol=1e-9)
    scaled = (scale_B * expected.loss_B).sum()
    torch.testing.assert_close(total, scaled, rtol=0, atol=1e-9)
    (mine,), (other,) = (
        torch.autograd.grad(v, h, retain_graph=True)
        for v, h in ((total, again_ND), (scaled, hidden_ND))
    )
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-9)
    for mine, other in zip(
        gradients(policy, 3 * policy(tokens, in_one_pass)[0]),
        gradients(policy, scaled),
        strict=True,
    ):
        torch.testing.assert_close(
            mine, 3 * other, rtol=1e-5, atol=2e-6
        )  # the models' own norms are float32


@pytest.mark.parametrize("positions", [1, 63, 64, 150])
@pytest.mark.parametrize("bias", [False, True])
def test_chunked_head_equals_the_naive_one(monkeypatch, positions, bias):
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 0)  # chunks of 64, so that 150 leaves an uneven tail
    torch.manual_seed(0)
    hidden = torch.randn(positions, 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(37, 12, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(37, dtype=torch.float64, requires_grad=True) if bias else None
    target = torch.randint(37, (positions,))
    expected = F.linear(hidden, weight, offset).log_softmax(-1).gather(1, target[:, None])[:, 0]
    found = token_log_probs(hidden, Head(weight, offset, None), target)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    scale = torch.randn(positions, dtype=torch.float64)
    inputs = [tensor for tensor in (hidden, weight, offset) if tensor is not None]
    for mine, other in zip(
        torch.autograd.grad((scale * found).sum(), inputs),
        torch.autograd.grad((scale * expected).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


def test_a_frozen_projection_gets_no_gradient():
    policy = make_policy_of("Llama")
    policy.model.lm_head.weight.requires_grad_(False)
    tokens = pack(*sequences())
    ones = torch.ones(len(tokens.length_B))
    total, *_ = policy(
        tokens, one_pass(tokens, TOPR(), torch.zeros(len(tokens.target_N)), ones, ones)
    )
    total.backward()
    assert (
        policy.model.lm_head.weight.grad is None
        and policy.model.model.norm.weight.grad.abs().sum() > 0
    )


def test_autocast_keeps_log_probs_and_their_gradient_in_float32(policy):
    policy = load_policy(str(policy))
    tokens = pack(*sequences())
    exact, _ = policy(tokens)
    ones = torch.ones(len(tokens.length_B))
    with torch.autocast("cpu", torch.bfloat16):
        found, hidden = policy(tokens)
        total, output, again = policy(tokens, one_pass(tokens, TOPR(), exact.detach(), ones, ones))
    assert found.dtype == output.log_ratio_B.dtype == torch.float32
    assert (found - exact).abs().max() < 0.1
    # only the hidden states are rounded
    head = output_head(policy.model)
    torch.testing.assert_close(
        found, token_log_probs(hidden.float(), head, tokens.target_N), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        output.log_ratio_B, torch.segment_reduce(found - exact, "sum", lengths=tokens.length_B)
    )
    loss_B = TOPR()(found, exact.detach(), tokens.length_B, ones).loss_B
    (mine,), (other,) = torch.autograd.grad(total, again), torch.autograd.grad(loss_B.sum(), hidden)
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def varlen_attn(
    query, key, value, ends_of_queries, ends_of_keys, *longest, scale, window_size, enable_gqa
):
    """What the kernel of a GPU promises, one sequence at a time: causal, the last query sees the last key."""
    assert longest == (max(ends_of_queries.diff()), max(ends_of_keys.diff()))
    outs, limits = (
        [],
        zip(
            *(ends.unfold(0, 2, 1).tolist() for ends in (ends_of_queries, ends_of_keys)),
            strict=True,
        ),
    )
    for (start, end), (first, last) in limits:
        rows = (query[start:end], key[first:last], value[first:last])
        distance = torch.arange(last - first - (end - start), last - first)[:, None] - torch.arange(
            last - first
        )
        seen = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        rows = (part.transpose(0, 1)[None] for part in rows)
        outs.append(
            F.scaled_dot_product_attention(
                *rows, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
            )[0]
        )
    return torch.cat(outs, dim=1).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 4])
def test_sequences_of_any_length_attend_as_the_row_does(monkeypatch, window):
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    spans = pack(*sequences()).spans
    size = (1, 6, spans[-1][1], 8)
    given = [
        torch.randn(1, heads, *size[2:], dtype=torch.float64, requires_grad=True)
        for heads in (6, 3, 3)
    ]
    row, _ = attend(None, *given, None, sliding_window=window, spans=Spans(spans))
    sequence = shared_prompts._attend_on_gpu([part[0] for part in given], spans, 8**-0.5, window)[
        None
    ]
    torch.testing.assert_close(sequence, row, rtol=0, atol=1e-12)
    upward = torch.randn_like(row)
    found, expected = (torch.autograd.grad(out, given, upward) for out in (sequence, row))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


class Flash(torch.autograd.Function):
    """A kernel that, as the real one, keeps its inputs."""

    @staticmethod
    def forward(ctx, query, key, value, *arguments):
        ctx.save_for_backward(query, key, value)
        *ctx.arguments, ctx.keywords = arguments
        return varlen_attn(query, key, value, *ctx.arguments, **ctx.keywords)

    @staticmethod
    def backward(ctx, upward):
        with torch.enable_grad():
            given = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            out = varlen_attn(*given, *ctx.arguments, **ctx.keywords)
        return *torch.autograd.grad(out, given, upward), *[None] * 5


def test_copies_of_a_prompts_keys_do_not_outlive_their_layer(monkeypatch):
    seen = []

    def kernel(query, key, value, *arguments, **keywords):
        seen.extend(weakref.ref(tensor.untyped_storage()) for tensor in (key, value))
        return Flash.apply(query, key, value, *arguments, keywords)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    spans = pack(*sequences()).spans
    size = (spans[-1][1], 8)
    given = [
        torch.randn(heads, *size, dtype=torch.float64, requires_grad=True) for heads in (6, 3, 3)
    ]
    out = shared_prompts._attend_on_gpu(given, spans, 8**-0.5, None)
    assert len(seen) == 2 and not any(storage() for storage in seen)
    row, _ = attend(None, *(part[None] for part in given), None, spans=Spans(spans))
    upward = torch.randn_like(out)
    found, expected = (
        torch.autograd.grad(out, given, upward),
        torch.autograd.grad(row[0], given, upward),
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_flash_attention_is_taken_under_autocast_though_rotary_embeddings_leave_float32(
    policy, monkeypatch
):
    taken = []

    def kernel(query, key, value, *arguments, **keywords):
        taken.append({query.dtype, key.dtype, value.dtype})
        return varlen_attn(query, key, value, *arguments, **keywords)

    policy, tokens = load_policy(str(policy)), pack(*sequences())
    exact, _ = policy(tokens)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(shared_prompts, "_has_flash", lambda query: True)
    policy(tokens)
    assert not taken  # in float32
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = policy(tokens)
    assert taken == [{torch.bfloat16}] * policy.model.config.num_hidden_layers
    assert (found - exact).abs().max() < 0.1


def test_score_keeps_the_order_and_equals_the_training_forward(policy):
    policy = load_policy(str(policy))
    given = sequences(count=23)
    order = np.random.default_rng(0).permutation(23)  # equal prompts no longer side by side
    prompts, responses = ([part[i] for i in order] for part in given)
    together, _ = policy(pack(prompts, responses))
    for tokens in (40, 100, 10_000):
        scores = score(policy, prompts, responses, tokens)
        assert [len(scored) for scored in scores] == [len(response) for response in responses]
        np.testing.assert_allclose(
            np.concatenate(scores), together.detach().numpy(), rtol=0, atol=2e-6
        )


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
    loaded, tokens = load_policy(str(tmp_path / "noisy")).train(), pack(*sequences())
    drawn = {
        noisy(tokens)[0].sum().item() for _ in range(20)
    }  # half of the time, one layer of two is kept
    assert len(drawn) > 1
    assert {loaded(tokens)[0].sum().item() for _ in range(20)} == {loaded(tokens)[0].sum().item()}
