"""Policies: each kind of broken folder is rejected and its repaired copy loads; fingerprints, prompts, export."""

import json
import pickle
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from conftest import clear_caches, make_policy
from safetensors.torch import load_file, save_file
from tokenizers import processors

from topr.batching import pack
from topr.evaluation import check_prompts
from topr.io import InputError
from topr.policy import (
    Policy,
    encode_prompt,
    export_policy,
    load_policy,
    load_tokenizer,
    policy_fingerprint,
    render_prompt,
    resolve_policy,
    tokenizer_fingerprint,
    vocabulary_and_context,
)
from topr.sampling import Sampling
from topr.tasks import Arithmetic, Problem

LAYER = "model.layers.1.mlp.up_proj.weight"
CHAT = [{"role": "user", "content": "1+1>"}]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def copy(policy, tmp_path) -> Path:
    """A copy to break."""
    return shutil.copytree(policy, tmp_path / "copy")


def change(path: Path, **changes) -> None:
    """Set keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, edit) -> None:
    path = folder / "model.safetensors"
    weights = {name: weight for name, weight in edit(load_file(path)).items() if weight is not None}
    save_file(weights, path, metadata={"format": "pt"})


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def overwrite(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def set_config(**changes):
    return lambda folder: change(folder / "config.json", **changes)


def set_weights(edit):
    return lambda folder: change_weights(folder, edit)


class Bomb:
    """Unpickling it fails the test."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


def keep_only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))


def lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {LAYER: "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def ask_for_code(folder: Path) -> None:
    (folder / "evil.py").write_text(
        "import pytest\npytest.fail('code beside the weights was run')\n"
    )
    calls = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    change(folder / "config.json", model_type="evil", auto_map=calls)


QUANTISED = {"quant_method": "bitsandbytes", "load_in_8bit": True}
BROKEN = {
    "no config": (remove("config.json"), "config.json is missing"),
    "no weights": (remove("model.safetensors"), "*.safetensors is missing"),
    "no tokenizer": (remove("tokenizer.json"), "no usable tokenizer"),
    "a pickle for weights": (keep_only_a_pickle, "*.safetensors is missing"),
    "truncated weights": (truncate, "cannot be loaded"),
    "a missing shard": (lose_a_shard, "cannot be loaded"),
    "a config that is not JSON": (overwrite("config.json", b"<html>404</html>"), "config.json cannot be read as JSON"),
    "a config that is a list": (overwrite("config.json", b"[]"), "the config.json of policy"),
    "a generation config that is not JSON": (overwrite("generation_config.json", b"{"), "cannot be read as JSON"),
    "a tokenizer that is not JSON": (overwrite("tokenizer.json", b"\0"), "no usable tokenizer"),
    "a missing tensor": (set_weights(lambda w: w | {LAYER: None}), f"lacks the weights {LAYER}"),
    "another shape": (set_weights(lambda w: w | {LAYER: w[LAYER][:-1].clone()}), "cannot be loaded as a causal model"),
    "NaN in a tensor": (set_weights(lambda w: w | {LAYER: w[LAYER] * float("nan")}), "hold NaN or infinity"),
    "quantised": (set_config(quantization_config=QUANTISED), "it is quantised"),
    "adapters": (overwrite("adapter_config.json", b"{}"), "holds adapters; merge them"),
    "an unknown architecture with its code": (ask_for_code, "the config.json of policy"),
    "no EOS": (
        lambda folder: change(folder / "tokenizer_config.json", eos_token=None),
        "has no end-of-sequence token among the 20",
    ),
    "an EOS beyond the vocabulary": (
        lambda folder: change(folder / "tokenizer_config.json", eos_token="<new>"),
        "has no end-of-sequence token among the 20",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_policy_is_rejected_and_its_repaired_folder_loads(policy, copy, name):
    damage, words = BROKEN[name]
    damage(copy)
    with pytest.raises(InputError) as caught:
        load_policy(str(copy))
    sentence = str(caught.value)
    assert words in sentence and str(copy) in sentence and "\n" not in sentence
    shutil.rmtree(copy)
    shutil.copytree(policy, copy)
    clear_caches()
    load_policy(str(copy))


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_rejected(policy, tmp_path):
    for name in ("nowhere", "some-organisation/some-model", str(tmp_path / "nowhere")):
        with pytest.raises(
            InputError, match="is neither a folder nor a model that the hub delivers"
        ):
            resolve_policy(name)
    assert resolve_policy(str(policy)) == policy


def log_probs(folder: Path) -> torch.Tensor:
    clear_caches()
    with torch.no_grad():
        return load_policy(str(folder)).train()(
            pack([torch.arange(3, 8).numpy()], [torch.arange(8, 15).numpy()])
        )[0]


def leave_code(folder: Path) -> None:
    ask_for_code(folder)
    change(folder / "config.json", model_type="llama")


HARMLESS = {
    "code beside a known architecture": leave_code,
    "a pickle beside the weights": overwrite("pytorch_model.bin", pickle.dumps(Bomb())),
    "dropout, which is turned off": set_config(attention_dropout=0.5),
    "unknown keys": set_config(unknown={"a": [1]}),
    "weights in float64": set_weights(
        lambda weights: {key: value.double() for key, value in weights.items()}
    ),
    "no generation config": remove("generation_config.json"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_change_the_model_is_accepted(policy, copy, name):
    HARMLESS[name](copy)
    assert torch.equal(log_probs(copy), log_probs(policy))


def test_weights_without_a_place_in_the_model_are_left_out_with_a_warning(policy, copy):
    change_weights(copy, lambda weights: weights | {"value_head.weight": torch.ones(1)})
    with pytest.warns(UserWarning, match="the weights value_head.weight.* are left out"):
        found = log_probs(copy)
    assert torch.equal(found, log_probs(policy))


def test_prompts_beyond_the_vocabulary_or_the_context_are_rejected(policy, copy):
    rules = json.loads((copy / "tokenizer.json").read_text())
    rules["model"]["vocab"]["1"] = 20
    (copy / "tokenizer.json").write_text(json.dumps(rules))
    assert vocabulary_and_context(str(policy)) == (20, 64)
    problems = [Problem("7", "1+1>", "2")]
    with pytest.raises(InputError, match="problem '7': .*beyond the policy's vocabulary of 20"):
        check_prompts(str(copy), Arithmetic(), problems, Sampling(max_new_tokens=60))
    with pytest.raises(InputError, match="problem '7': .*exceed the policy's context of 64"):
        check_prompts(str(policy), Arithmetic(), problems, Sampling(max_new_tokens=61))
    check_prompts(str(policy), Arithmetic(), problems, Sampling(max_new_tokens=60))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for message in messages %}", "do not fit the tokenizer's chat template"),
        (
            "{{ cycler.__init__.__globals__.os.popen('touch PWNED').read() }}",
            "do not fit the tokenizer's chat template",
        ),
    ],
)
def test_chat_messages_without_a_template_that_renders_them_are_rejected(policy, template, words):
    tokenizer = deepcopy(load_tokenizer(str(policy)))
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=words):
        render_prompt(CHAT, tokenizer)
    assert render_prompt("1+1>", tokenizer) == "1+1>"
    tokenizer.chat_template = TEMPLATE
    assert render_prompt(CHAT, tokenizer) == "1+1>"


def test_a_prompt_gets_one_bos_unless_its_template_writes_it(policy):
    tokenizer = deepcopy(load_tokenizer(str(policy)))
    tokenizer.bos_token = "<unk>"
    bos = tokenizer.bos_token_id
    add_bos = processors.TemplateProcessing("<unk> $A", special_tokens=[("<unk>", bos)])
    tokenizer.backend_tokenizer.post_processor = add_bos
    tokenizer.chat_template = TEMPLATE
    assert encode_prompt("1>", tokenizer) == ("1>", [bos, 4, 19])
    assert encode_prompt("<unk>1>", tokenizer) == ("<unk>1>", [bos, 4, 19])
    assert encode_prompt([{"role": "user", "content": "1>"}], tokenizer) == ("1>", [4, 19])


def test_a_policys_fingerprint_follows_its_weights_and_not_their_files(policy, tmp_path):
    assert policy_fingerprint(str(policy)) == policy_fingerprint(
        str(make_policy(tmp_path / "same"))
    )
    assert policy_fingerprint(str(policy)) != policy_fingerprint(
        str(make_policy(tmp_path / "other", seed=1))
    )
    model = load_policy(str(policy)).model.bfloat16()
    model.save_pretrained(tmp_path / "half")
    model.float().save_pretrained(tmp_path / "wide", max_shard_size="4KB")
    assert len(list((tmp_path / "wide").glob("*.safetensors"))) > 1
    assert policy_fingerprint(str(tmp_path / "half")) == policy_fingerprint(str(tmp_path / "wide"))
    with torch.no_grad():
        next(model.parameters())[-1, -1] += 1
    model.save_pretrained(tmp_path / "moved")
    assert policy_fingerprint(str(tmp_path / "moved")) != policy_fingerprint(str(tmp_path / "wide"))


def test_a_tokenizers_fingerprint_follows_its_rules_tokens_and_template_and_not_its_use(policy):
    tokenizer = deepcopy(load_tokenizer(str(policy)))
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(
        ["1", "1+1"], padding=True, truncation=True, max_length=2
    )  # leaves its mark on the fast tokenizer
    assert tokenizer_fingerprint(tokenizer) == before
    found = [before]
    for edit in (
        lambda changed: setattr(changed, "chat_template", TEMPLATE),
        lambda changed: setattr(changed, "eos_token", "<pad>"),
        lambda changed: changed.add_tokens(["x"]),
    ):
        changed = deepcopy(tokenizer)
        edit(changed)
        found.append(tokenizer_fingerprint(changed))
    assert len(set(found)) == 4


def test_an_exported_policy_is_the_policy(policy, tmp_path):
    original = load_policy(str(policy))
    with torch.no_grad():
        next(original.parameters()).add_(0.1)
    export_policy(original, tmp_path / "exported")
    exported = load_policy(str(tmp_path / "exported"))
    for mine, other in zip(exported.parameters(), original.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert tokenizer_fingerprint(exported.tokenizer) == tokenizer_fingerprint(original.tokenizer)
    assert isinstance(exported, Policy) and exported.end_tokens == original.end_tokens == {1}


def test_the_tokenizer_and_the_generation_config_both_end_responses(copy):
    change(copy / "generation_config.json", eos_token_id=[1, 5])
    assert load_policy(str(copy)).end_tokens == {1, 5}
    change(copy / "generation_config.json", eos_token_id=7)
    assert load_policy(str(copy)).end_tokens == {1, 7}
