"""Policies: broken folders are rejected, harmless changes are not; identity, prompts, export."""

import importlib
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
from topr.io import InputError
from topr.policy import encode_prompt, export_policy, load_policy, load_tokenizer
from topr.policy.files import resolve_policy
from topr.policy.sharding import full_state_dict
from topr.run.identity import policy_hash, source_hash, tokenizer_hash
from topr.tasks import GSM8K, MATH, Arithmetic, ArithmeticVerifier, Verifier

LAYER = "model.layers.1.mlp.up_proj.weight"
CHAT = [{"role": "user", "content": "1+1>"}]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def copy(policy, tmp_path) -> Path:
    """A copy to change."""
    return shutil.copytree(policy, tmp_path / "copy")


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def overwrite(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def set_keys(name: str, **changes):
    """Set keys of a JSON file."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps(content))

    return change


def set_weights(edit):
    """Change the dictionary of weights in place."""

    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        edit(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return change


class Bomb:
    """Unpickling it fails the test."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


def leave_a_pickle(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))


def keep_only_a_pickle(folder: Path) -> None:
    leave_a_pickle(folder)
    (folder / "model.safetensors").unlink()


def bring_code(folder: Path, model_type: str = "llama") -> None:
    (folder / "evil.py").write_text("import pytest\npytest.fail('code of a model was run')\n")
    calls = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    set_keys("config.json", model_type=model_type, auto_map=calls)(folder)


BROKEN = {
    "no tokenizer": (remove("tokenizer.json"), "no usable tokenizer"),
    "no JSON": (overwrite("config.json", b"<html>"), "config.json of policy"),
    "a pickle for weights": (keep_only_a_pickle, "*.safetensors is missing"),
    "damaged weights": (overwrite("model.safetensors", b"\0" * 99), "cannot be loaded"),
    "a missing tensor": (set_weights(lambda w: w.pop(LAYER)), f"lacks the weights {LAYER}"),
    "NaN": (set_weights(lambda w: w[LAYER].fill_(torch.nan)), "hold NaN or infinity"),
    "quantised": (
        set_keys("config.json", quantization_config={"quant_method": "bitsandbytes"}),
        "is quantised",
    ),
    "adapters": (overwrite("adapter_config.json", b"{}"), "holds adapters; merge them"),
    "an architecture with its code": (
        lambda folder: bring_code(folder, "evil"),
        "the config.json of policy",
    ),
    "no EOS": (set_keys("tokenizer_config.json", eos_token=None), "no end-of-sequence token"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_policy_is_rejected_in_one_sentence(copy, name):
    damage, words = BROKEN[name]
    load_policy(str(copy))
    damage(copy)
    clear_caches()
    with pytest.raises(InputError) as caught:
        load_policy(str(copy))
    sentence = str(caught.value)
    assert words in sentence and str(copy) in sentence and "\n" not in sentence


@pytest.mark.parametrize("name", ["some-organisation/some-model", "/nowhere"])
def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_rejected(name):
    with pytest.raises(InputError, match="neither a folder nor a model that the hub delivers"):
        resolve_policy(name)


def log_probs(folder: Path) -> torch.Tensor:
    clear_caches()
    tokens = pack([torch.arange(3, 8).numpy()], [torch.arange(8, 15).numpy()])
    with torch.no_grad():
        return load_policy(str(folder)).train().log_probs(tokens)


HARMLESS = {
    "code beside a known architecture": bring_code,
    "a pickle beside the weights": leave_a_pickle,
    "dropout, which is turned off": set_keys("config.json", attention_dropout=0.5),
    "a weight without a place": set_weights(lambda w: w.update({"value.weight": torch.ones(1)})),
    "no generation config": remove("generation_config.json"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_change_the_model_is_accepted(policy, copy, name):
    HARMLESS[name](copy)
    assert torch.equal(log_probs(copy), log_probs(policy))


BAD_TEMPLATES = [
    (None, "chat_template is not set"),
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ cycler.__init__.__globals__.os.popen('touch PWNED').read() }}", "do not fit"),
]


@pytest.mark.parametrize(("template", "words"), BAD_TEMPLATES)
def test_chat_messages_without_a_template_that_renders_them_are_rejected(policy, template, words):
    tokenizer = deepcopy(load_tokenizer(str(policy)))
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=words):
        encode_prompt(CHAT, tokenizer)
    assert not Path("PWNED").exists()


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


THETA = {"rope_theta": 10001.0, "rope_type": "default"}
RELEVANT = {
    "the last bit of a weight": set_weights(lambda w: w[LAYER][0, :1].mul_(1 + 2**-23)),
    "another base of the positions": set_keys("config.json", rope_parameters=THETA),
    "a second end token": set_keys("generation_config.json", eos_token_id=[1, 5]),
    "another end token": set_keys("tokenizer_config.json", eos_token="<pad>"),
    "a chat template": set_keys("tokenizer_config.json", chat_template=TEMPLATE),
}


@pytest.mark.parametrize("name", RELEVANT)
def test_a_policys_hash_follows_what_decides_its_outputs(policy, copy, name):
    assert policy_hash(str(copy)) == policy_hash(str(policy))  # whatever the folder is called
    RELEVANT[name](copy)
    clear_caches()
    assert policy_hash(str(copy)) != policy_hash(str(policy))


def test_a_policys_hash_ignores_files_and_widths_of_the_same_values(policy, tmp_path):
    original = load_policy(str(policy))
    export_policy(original, tmp_path / "exported")
    assert policy_hash(str(tmp_path / "exported")) == policy_hash(str(policy))
    original.model.bfloat16()
    export_policy(original, tmp_path / "half")
    original.model.float().save_pretrained(tmp_path / "wide", max_shard_size="4KB")
    original.tokenizer.save_pretrained(tmp_path / "wide")
    assert len(list((tmp_path / "wide").glob("*.safetensors"))) > 1
    assert policy_hash(str(tmp_path / "half")) == policy_hash(str(tmp_path / "wide"))
    assert policy_hash(str(tmp_path / "half")) != policy_hash(str(policy))


@pytest.mark.parametrize("tied", [False, True])
def test_an_export_holds_the_weights_in_memory(tmp_path, tied):
    base = str(make_policy(tmp_path / "base", tie_word_embeddings=tied))
    policy = load_policy(base)
    with torch.no_grad():
        next(policy.parameters()).add_(0.1)
    export_policy(policy, tmp_path / "exported", full_state_dict(policy))
    assert policy_hash(str(tmp_path / "exported")) != policy_hash(base)
    exported = load_policy(str(tmp_path / "exported"))
    assert exported.state_dict().keys() == policy.state_dict().keys()
    assert all(map(torch.equal, exported.parameters(), policy.parameters()))


def test_a_tokenizers_hash_follows_its_rules_and_not_its_use(policy):
    tokenizer = deepcopy(load_tokenizer(str(policy)))
    before = tokenizer_hash(tokenizer)
    # leaves its mark on a fast tokenizer
    tokenizer(["1", "1+1"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == before
    tokenizer.add_tokens(["x"])
    assert tokenizer_hash(tokenizer) != before


GRADER = """
from topr.tasks.task import Task, exact_grade

class Mine(Task):
    def __init__(self, limit: int = 1):
        self.limit = limit

    def grade(self, response, gold):
        return exact_grade(response[:self.limit], gold)
"""


def test_a_graders_hash_follows_its_source_files_and_settings(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "my_grader.py"
    table = tmp_path / "units.txt"
    path.write_text(GRADER)
    table.write_text("kg")
    task = importlib.import_module("my_grader").Mine
    before = source_hash(task())
    assert before == source_hash(task(limit=1)) != source_hash(task(limit=2))
    path.write_text(GRADER.replace("[:self", "[-self"))
    changed = source_hash(task())
    task.sources = [table]
    with_table = source_hash(task())
    table.write_text("g")
    assert len({before, changed, with_table, source_hash(task())}) == 4


@pytest.mark.parametrize("kind", [Arithmetic, ArithmeticVerifier, GSM8K, MATH, Verifier])
def test_equal_tasks_have_one_hash(kind):
    one, other = kind(), kind()
    assert source_hash(one) == source_hash(other)


def test_the_tokenizer_and_the_generation_config_both_end_responses(copy):
    for ends, expected in ([1, 5], {1, 5}), (7, {1, 7}):
        set_keys("generation_config.json", eos_token_id=ends)(copy)
        assert load_policy(str(copy)).end_tokens == expected
