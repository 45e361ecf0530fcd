"""Identity is content: hashes by which policies, data, problems and graders are recognised.

Nothing is recognised by its name, its path or a part of it.
"""

import hashlib
import inspect
import json
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash
from safetensors.torch import load_file
from torch import Tensor

from topr.io import InputError, explained
from topr.io.settings import class_of, describe, plain
from topr.policy.files import load_config, load_generation_config, load_tokenizer, resolve_policy

# keys of configs that say where and with what a policy was saved, not what it computes
UNRELATED = [
    "_name_or_path",
    "_from_model_config",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "architectures",
]


def content_hash(*parts) -> str:
    """16 hex digits of any values that JSON or `describe` can write."""
    return xxhash.xxh3_64_hexdigest(json.dumps(parts, sort_keys=True, default=describe).encode())


def file_hash(path: str | Path) -> str:
    """Hash of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def source_hash(part) -> str:
    """Hash of what a task, a loss, an advantage or an optimiser computes: the source of its class's
    modules, of those beside them that they import, its `sources` if it has any, its attributes."""
    files = list(getattr(part, "sources", []))
    sources = []
    made = class_of(part)  # of an optimiser perhaps a function
    for kind in getattr(made, "__mro__", [made]):
        if kind.__module__ in sys.stdlib_module_names:
            continue  # an upgrade of Python computes the same
        file = getattr(sys.modules[kind.__module__], "__file__", None)
        if file:
            files.append(Path(file))
        else:
            sources.append(inspect.getsource(kind))  # of a notebook
    for file in files:  # also those that the loop appends
        for line in re.findall(r"^\s*(?:from|import) .*", file.read_text(), re.MULTILINE):
            # of a.b.c also b.c and c: a module can lie beside its importer
            words = re.findall(r"\b(?=(\w[\w.]*))", line)
            beside = [file.parent / f"{word.replace('.', '/')}.py" for word in words]
            files += {path for path in beside if path.exists()}.difference(files)
    sources += sorted(map(file_hash, set(files)))
    attributes = getattr(part, "__dict__", {})  # None, no scheduler, has none
    settings = {name: value for name, value in attributes.items() if name != "init_args"}
    return content_hash(made.__qualname__, sources, settings)


def tokenizer_hash(tokenizer) -> str:
    """Hash of what decides token ids: rules, vocabulary, special tokens, chat template. Trajectory
    files of all earlier versions hold it in this form."""
    rules = tokenizer.get_vocab()
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        for key in ("padding", "truncation"):  # mere use sets them
            rules.pop(key, None)
    text = json.dumps(
        [rules, tokenizer.special_tokens_map, tokenizer.chat_template], sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def policy_hash(policy: str) -> str:
    """Hash of a stored policy: all weights in float32, both configs, the tokenizer. The same values
    in another file layout or in a wider dtype have the same hash."""
    # ctime changes with every write, and cannot be set
    states = tuple(path.stat().st_ctime_ns for path in sorted(resolve_policy(policy).iterdir()))
    return _stored_policy_hash(policy, states)


def weights_hash(policy: str, weights: dict[str, Tensor]) -> str:
    """`policy_hash` of a stored policy with other weights, such as those in training."""
    tensors = {name: tensor_hash(weight) for name, weight in weights.items()}
    configs = []
    for config in (load_config(policy), load_generation_config(policy)):
        entries = config.to_dict()
        configs.append({key: entries[key] for key in entries if key not in UNRELATED})
    return content_hash(sorted(tensors.items()), configs, tokenizer_hash(load_tokenizer(policy)))


@lru_cache(maxsize=16)  # 8 billion weights take seconds
def _stored_policy_hash(policy: str, states: tuple[int, ...]) -> str:
    weights: dict[str, Tensor] = {}
    with explained(f"policy {policy!r}: its weights cannot be read"):
        for path in resolve_policy(policy).glob("*.safetensors"):
            weights |= load_file(path)  # mapped into memory
    return weights_hash(policy, weights)


def tensor_hash(tensor: Tensor) -> str:
    """Hash of a tensor's shape and its values in float32."""
    values: Any = tensor.detach().float().cpu().contiguous().numpy()
    return f"{list(values.shape)} {xxhash.xxh3_64_hexdigest(values)}"


def provenance(name: str, precision: str, **more) -> dict:
    """Metadata of a trajectory file whose log mu this stored policy scored; see
    `trajectories.file.METADATA_KEYS`."""
    tokenizer = tokenizer_hash(load_tokenizer(name))
    return {"tokenizer": tokenizer, "policy": policy_hash(name), "precision": precision, **more}


def decisive(module) -> dict:
    """What decides the updates and the figures of a module's run, by content."""
    names = ("lora", "optimizer", "lr_scheduler", "gradient_clip_val")
    settings = {f"model.{name}": plain(getattr(module, name)) for name in names}
    settings |= {
        "code of model.optimizer or model.lr_scheduler": content_hash(
            source_hash(module.optimizer), source_hash(module.lr_scheduler)
        ),
        "model.loss": source_hash(module.loss),
        "model.weights": module.weights and file_hash(module.weights),
        "model.policy": policy_hash(module.policy_name),
        "trainer.precision": module.trainer.precision,
        "trainer.limit_train_batches": module.trainer.limit_train_batches,
    }
    data = module.trainer.datamodule
    return settings | plain(data.decisive()) if data else settings


def check_unchanged(module, checkpoint: dict):
    """Raise an InputError if a resumed run would go on with other data or settings, or has gone on
    for longer than it is now told to."""
    before = checkpoint["topr"]["decisive"]
    changed = [name for name, value in decisive(module).items() if before.get(name, value) != value]
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["ready"]
    for name, made in {"max_steps": checkpoint["global_step"], "max_epochs": epochs}.items():
        if 0 < getattr(module.trainer, name) < made:
            changed.append(f"trainer.{name}")
    if changed:
        path = module.trainer.ckpt_path
        raise InputError(
            f"{path} is of a run with another {', '.join(changed)}",
            f"restore it, name another folder, or start from its weights: --model.weights {path} "
            "in place of --ckpt_path",
        )


def check_fit(module, checkpoint: dict, path):
    """Raise an InputError unless a checkpoint holds what a module trains, all of it."""
    before = checkpoint.get("topr", {}).get("decisive")
    if before is None:
        raise InputError(
            f"{path} does not say what it was trained on: an earlier version wrote it",
            "go on with that version, or from the policy/ folder of its run",
        )
    lora = checkpoint["hyper_parameters"]["lora"]
    if lora != plain(module.lora):
        raise InputError(f"{path} was written with model.lora {lora}", "set it so")
    if before["model.policy"] != policy_hash(module.policy_name):
        raise InputError(f"{path} was trained from another model.policy", "name that one")
