"""Broken and hostile policy folders: each is refused in one sentence, or does what the good one does; no code runs."""

import json
import os
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_policy, refused
from safetensors.torch import load_file, save, save_file
from test_hostile_trajectories import special, unreadable

from topr import trajectories
from topr.tokenizer import load_tokenizer
from topr.trajectories import read_trajectories

pytestmark = pytest.mark.timeout(30)  # nothing may hang, and nothing may build a model of a million layers
TEXT = {"prompt": "1+1>", "response": "#2", "reward": 1}
CHAT = {"messages": [{"role": "user", "content": "1+1>"}, {"role": "assistant", "content": "#2"}], "reward": 1}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = make_policy(tmp_path_factory.mktemp("policy") / "base")
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


@pytest.fixture
def policy(good, tmp_path) -> Path:
    """A copy to break."""
    return shutil.copytree(good, tmp_path / "broken")


def convert(run, policy, row: dict = TEXT):
    Path("a.jsonl").write_text(json.dumps(row))
    return "import", "a.jsonl", "--policy", policy, "--out", "out.parquet"


def refuse(run, policy, row: dict = TEXT, words: str = "broken") -> None:
    refused(run, words, *convert(run, policy, row), main=trajectories.main)
    assert not list(run.folder.rglob("PWNED"))


def same(run, policy, good, row: dict = TEXT) -> None:
    """Import with a policy that is as good: the same ids and log-probs."""
    found = []
    for folder in (policy, good):
        code, _, err = run(trajectories.main, *convert(run, folder, row))
        assert code == 0, err
        found += read_trajectories("out.parquet")
    assert found[0] == found[1]
    assert not list(run.folder.rglob("PWNED"))


def change(path: Path, **changes) -> None:
    """Set keys of a JSON file; those that are `...` are removed."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


class Bomb:
    """Unpickling it writes a file."""

    def __reduce__(self):
        return os.system, ("touch PWNED",)


CODE = "open('PWNED', 'w').close()\n"
CONTENTS = {
    "missing": None,
    "empty": b"",
    "garbage": b"\x00\xff" * 50,
    "cut": ...,
    "a list": b"[]",
    "text": b'"llama"',
    "a number": b"7",
    "null": b"null",
    "an empty object": b"{}",
    "deep": b'{"a":' * 100_000,
    "a pickle": pickle.dumps(Bomb()),
    "HTML": b"<html>404</html>",
    "a pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 16\n",
}
OPTIONAL = [("generation_config.json", "missing"), ("generation_config.json", "an empty object")]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
def test_contents(run, policy, good, name, content):
    path = policy / name
    text = path.read_bytes()[: path.stat().st_size // 2] if content == "cut" else CONTENTS[content]
    path.unlink()
    if text is not None:
        path.write_bytes(text)
    if (name, content) in OPTIONAL:
        same(run, policy, good)
    else:
        refuse(run, policy)


@pytest.mark.parametrize("kind", ["folder", "FIFO", "socket", "device", "broken link", "link to itself", "unreadable"])
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
def test_what_is_no_file(run, policy, name, kind, monkeypatch):
    (policy / name).unlink()
    monkeypatch.chdir(policy)  # the path of a socket must be short
    {
        "folder": os.mkdir,
        "FIFO": os.mkfifo,
        "socket": special,
        "device": lambda path: os.symlink("/dev/zero", path),
        "broken link": lambda path: os.symlink("nowhere", path),
        "link to itself": lambda path: os.symlink(path, path),
        "unreadable": unreadable,
    }[kind](name)
    monkeypatch.chdir(run.folder)
    refuse(run, policy)


SIZES = [..., None, 0, -1, "16", 1.5, True, [], {}, 10**9, 10**30]
CONFIG = {
    "hidden_size": [*SIZES[1:], 8, 32],
    "intermediate_size": [*SIZES[1:], 8, 32],
    "num_hidden_layers": [*SIZES[1:], 1, 3, 10**6],
    "num_attention_heads": [*SIZES[1:], 3],
    "num_key_value_heads": [0, -1, "1", 1.5, [], {}, 3, 10**9],
    "head_dim": [0, -1, "8", 1.5, [], {}, 7, 10**9],
    "vocab_size": [*SIZES[1:], 10, 30],
    "max_position_embeddings": [0, -1, "64", 1.5, [], {}],
    "rms_norm_eps": ["x", [], {}, float("nan")],
    "hidden_act": ["evil", 3, [], {}, "__import__"],
    "rope_parameters": ["x", 3, [], {"rope_type": "evil"}, {"rope_theta": "x", "rope_type": "default"}],
    "model_type": [None, "", "evil", 3, [], {}, "bert", "clip", "../llama", "llama\n"],
    "eos_token_id": [20, -1, "1", 1.5, {}, [99], 10**30],
    "quantization_config": ["x", 3, {"quant_method": "evil"}, {"quant_method": "bitsandbytes", "load_in_8bit": True}],
    "tie_word_embeddings": ["x", 3, []],
    "attention_dropout": ["x", [], {}],
    "dtype": ["evil", "os.system"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in CONFIG for value in CONFIG[key]])
def test_config(run, policy, key, value):
    change(policy / "config.json", **{key: value})
    if key == "eos_token_id":
        change(policy / "generation_config.json", **{key: value})
    refuse(run, policy)


def test_what_decides_nothing_is_welcome(run, policy, good):
    """Dropout, which is off; keys that nobody reads."""
    change(policy / "config.json", attention_dropout=0.5, architectures=3, more={"a": [1]}, use_cache=False)
    same(run, policy, good)


@pytest.mark.parametrize("value", [20, -1, "1", 1.5, {}, [99], [None], ["1"], [[1]], 10**30, True])
def test_generation_config(run, policy, value):
    change(policy / "generation_config.json", eos_token_id=value)
    refuse(run, policy)


CALLS = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Tokenizer", None]}


@pytest.mark.parametrize("kind", ["llama", "evil", None])
@pytest.mark.parametrize("name", ["evil", "owner/name--evil", "../evil", "/tmp/evil", "os"])
def test_code_beside_the_weights(run, policy, good, name, kind):
    (policy / "evil.py").write_text(CODE)
    (policy.parent / "evil.py").write_text(CODE)
    calls = json.loads(json.dumps(CALLS).replace("evil.", f"{name}."))
    change(policy / "config.json", model_type=kind, auto_map=calls)
    change(policy / "tokenizer_config.json", auto_map=calls)
    same(run, policy, good) if kind == "llama" else refuse(run, policy)


TOKENIZER = {
    "eos_token": [..., None, "", 3, [], {}, ["<eos>"], {"content": 3}, True],
    "pad_token": [3, [], {}],
    "model_max_length": ["x", [], {}],
    "tokenizer_class": [3, [], {}],
    "extra_special_tokens": [3, "x"],
    "added_tokens_decoder": [3, [], {"x": {}}, {"3": "x"}],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in TOKENIZER for value in TOKENIZER[key]])
def test_tokenizer_config(run, policy, key, value):
    change(policy / "tokenizer_config.json", **{key: value})
    refuse(run, policy)


RULES = {
    "model": [..., None, [], {}, {"type": "Evil"}, {"type": "WordLevel", "vocab": {}, "unk_token": "<unk>"}],
    "version": ["9.9", 3],
    "added_tokens": [None, {}, [3], [{"id": -1, "content": "x"}], [{"id": 10**30, "content": "x"}]],
    "pre_tokenizer": [3, {"type": "Evil"}, {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}],
    "decoder": [3, {"type": "Evil"}],
    "normalizer": [3, {"type": "Evil"}],
    "post_processor": [3, {"type": "Evil"}],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in RULES for value in RULES[key]])
def test_tokenizer_rules(run, policy, key, value):
    change(policy / "tokenizer.json", **{key: value})
    refuse(run, policy)


def test_ids_beyond_the_vocabulary(run, policy):
    rules = json.loads((policy / "tokenizer.json").read_text())
    rules["model"]["vocab"]["1"] = 10**6
    (policy / "tokenizer.json").write_text(json.dumps(rules))
    refuse(run, policy, words="vocabulary")


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}",
        "{{ messages[7].content }}{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ ''.__class__.__mro__[1].__subclasses__()[0]() }}",
        "{{ cycler.__init__.__globals__.os.popen('touch PWNED').read() }}",
        "{{ self.__init__.__globals__.__builtins__.open('PWNED', 'w') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.system('touch PWNED') }}",
        "{% for i in range(10 ** 12) %}x{% endfor %}",
        "{{ evil(1) }}",
        "",
    ],
)
def test_chat_templates(run, policy, template):
    change(policy / "tokenizer_config.json", chat_template=template)
    refuse(run, policy, CHAT, "")


@pytest.mark.parametrize("template", [3, [3], ["x"], [{"name": "x"}], {"a": 3}])
def test_chat_templates_of_other_kinds(run, policy, template):
    change(policy / "tokenizer_config.json", chat_template=template)
    refuse(run, policy, CHAT, "")


@pytest.mark.parametrize("share", np.linspace(0.0005, 0.9995, 30).round(4))
def test_truncated_weights(run, policy, share):
    path = policy / "model.safetensors"
    os.truncate(path, int(share * path.stat().st_size))
    refuse(run, policy)


def header(path: Path, edit) -> None:
    """Write a safetensors file anew with another header."""
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    known = json.loads(content[8 : 8 + size])
    new = edit(known)
    new = new if isinstance(new, bytes) else json.dumps(new).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + content[8 + size :])


NAME = "model.norm.weight"
HEADERS = {
    "no JSON": lambda h: b"{" * 40,
    "a list": lambda h: [h],
    "no UTF-8": lambda h: b'{"\xff": 1}',
    "empty": lambda h: b"",
    "nothing in it": lambda h: {},
    "negative offsets": lambda h: h | {NAME: h[NAME] | {"data_offsets": [-64, 0]}},
    "overlapping offsets": lambda h: h | {NAME: h[NAME] | {"data_offsets": [0, 64]}},
    "offsets beyond the end": lambda h: h | {NAME: h[NAME] | {"data_offsets": [2**40, 2**40 + 64]}},
    "offsets that fall": lambda h: h | {NAME: h[NAME] | {"data_offsets": h[NAME]["data_offsets"][::-1]}},
    "a shape that lies": lambda h: h | {NAME: h[NAME] | {"shape": [10**6]}},
    "a shape that overflows": lambda h: h | {NAME: h[NAME] | {"shape": [2**62, 2**62]}},
    "another type": lambda h: h | {NAME: h[NAME] | {"dtype": "I32"}},
    "an unknown type": lambda h: h | {NAME: h[NAME] | {"dtype": "F31"}},
    "no type": lambda h: h | {NAME: {"shape": [16], "data_offsets": h[NAME]["data_offsets"]}},
    "a tensor of another name": lambda h: {key.replace("model.norm", "model.form"): value for key, value in h.items()},
    "metadata of numbers": lambda h: h | {"__metadata__": {"format": 3}},
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_weights(run, policy, name):
    header(policy / "model.safetensors", HEADERS[name])
    refuse(run, policy)


@pytest.mark.parametrize("size", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_lengths_of_headers_that_lie(run, policy, size):
    path = policy / "model.safetensors"
    path.write_bytes(struct.pack("<Q", size) + path.read_bytes()[8:])
    refuse(run, policy)


LAYER = "model.layers.1.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
TENSORS = {
    "missing": lambda w: {key: value for key, value in w.items() if key != LAYER},
    "none at all": lambda w: {},
    "extra": lambda w: w | {"model.layers.2.mlp.up_proj.weight": w[LAYER] + 1},
    "another shape": lambda w: w | {LAYER: w[LAYER][:-1].clone()},
    "turned": lambda w: w | {LAYER: w[LAYER].T.contiguous()},
    "flat": lambda w: w | {LAYER: w[LAYER].flatten()},
    "a scalar": lambda w: w | {LAYER: torch.tensor(1.0)},
    "empty": lambda w: w | {LAYER: torch.zeros(0)},
    "whole numbers": lambda w: w | {LAYER: w[LAYER].int()},
    "bytes": lambda w: w | {LAYER: w[LAYER].byte()},
    "bools": lambda w: w | {LAYER: w[LAYER] > 0},
    "float8": lambda w: w | {LAYER: w[LAYER].to(torch.float8_e4m3fn)},
    "complex": lambda w: w | {LAYER: w[LAYER].to(torch.complex64)},
    "one NaN": lambda w: w | {LAYER: w[LAYER].index_fill(0, torch.tensor(3), float("nan"))},
    "infinite": lambda w: w | {LAYER: w[LAYER] / 0},
    "a NaN that no check reads": lambda w: w | {EMBEDDING: w[EMBEDDING].index_fill(0, torch.tensor(19), float("nan"))},
    "beyond float32": lambda w: w | {LAYER: w[LAYER].double() * 1e300},
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(run, policy, name):
    path = policy / "model.safetensors"
    save_file(TENSORS[name](load_file(path)), path, metadata={"format": "pt"})
    refuse(run, policy)


def test_wider_weights_are_welcome(run, policy, good):
    path = policy / "model.safetensors"
    save_file({name: weight.double() for name, weight in load_file(path).items()}, path, metadata={"format": "pt"})
    same(run, policy, good)


SHARD = "model-00001-of-00001.safetensors"
INDICES = {
    "missing shard": {"weight_map": {LAYER: "model-00009-of-00009.safetensors"}},
    "outside": {"weight_map": ...},
    "outside by an absolute path": {"weight_map": "/"},
    "a pickle": {"weight_map": {LAYER: "pytorch_model.bin"}},
    "no map": {},
    "a map of nothing": {"weight_map": {}},
    "a list": [],
    "a map of numbers": {"weight_map": {LAYER: 3}},
    "a list for a map": {"weight_map": [SHARD]},
    "half of the tensors": {"weight_map": {LAYER: SHARD}},
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_of_shards(run, policy, good, name):
    weights = load_file(policy / "model.safetensors")
    index = INDICES[name]
    if name.startswith("outside"):
        place = good / "model.safetensors" if "absolute" in name else f"../{good.name}/model.safetensors"
        shutil.copytree(good, policy.parent / good.name)
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, str(place))}
    (policy / "model.safetensors").rename(policy / SHARD)
    (policy / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    (policy / "model.safetensors.index.json").write_text(json.dumps(index))
    if name == "half of the tensors":
        save_file({LAYER: weights[LAYER]}, policy / SHARD, metadata={"format": "pt"})
    refuse(run, policy)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.bin", "tf_model.h5", "model.pt", "adapter_model.bin"])
def test_pickles(run, policy, good, name):
    (policy / name).write_bytes(pickle.dumps(Bomb()))
    same(run, policy, good)  # not even looked at
    (policy / "model.safetensors").unlink()
    refuse(run, policy)


@pytest.mark.parametrize("weights", ["adapter_model.bin", "adapter_model.safetensors"])
@pytest.mark.parametrize("base", ["GOOD", "nowhere", None])
def test_adapters(run, policy, good, base, weights):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(good) if base == "GOOD" else base, "r": 4}
    (policy / "adapter_config.json").write_text(json.dumps(adapter))
    (policy / weights).write_bytes(pickle.dumps(Bomb()) if weights.endswith("bin") else save({}))
    refuse(run, policy)
    for name in ("config.json", "model.safetensors"):
        (policy / name).unlink()
    refuse(run, policy)
