"""Checkpoints: written completely or not at all, found again, read without executing anything."""

import io
import os
import pickle
from pathlib import Path

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from topr.io import atomic, explained, remove


class AtomicCheckpointIO(TorchCheckpointIO):
    """A checkpoint file appears under its name when it is complete, and a folder of shards
    disappears at once. A folder of shards is complete when it holds meta.pt, written last."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        what = f"the checkpoint {path} cannot be written"
        remedy = "earlier ones are kept: make room and resume with --ckpt_path last"
        # torch raises a RuntimeError for a full disk
        with explained(what, (OSError, RuntimeError), remedy), atomic(path) as temporary:
            torch.save(checkpoint, temporary)

    def remove_checkpoint(self, path):
        path = Path(path)
        aside = path.with_name(f".{path.name}.tmp")
        if path.exists():  # the user may have moved it
            os.replace(path, aside)  # half a folder must not pass for a checkpoint
            remove(aside)


# what the index of a sharded checkpoint is made of
PLAIN = [
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "_StorageInfo",
    "PosixPath",
    "Size",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "_MEM_FORMAT_ENCODING",
    "_get_layout",
    "float32",
    "float64",
    "bfloat16",
    "float16",
    "int64",
    "uint8",
]


class PlainUnpickler(pickle.Unpickler):
    """Reads the index of a sharded checkpoint, which torch unpickles whatever it holds: refuses all
    but what describes tensors."""

    def find_class(self, module, name):
        if name not in PLAIN or not module.startswith(("torch", "pathlib")):
            raise pickle.UnpicklingError(f"{module}.{name} does not describe tensors")
        return super().find_class(module, name)


def updates_before(checkpoint: Path) -> int | None:
    """Updates before a checkpoint, a file or a folder of shards; None if it is incomplete or not a
    checkpoint."""
    sharded = checkpoint.is_dir()
    try:
        file = checkpoint / "meta.pt" if sharded else checkpoint
        content = torch.load(file, mmap=True, map_location="cpu", weights_only=True)
        if sharded:
            PlainUnpickler(io.BytesIO((checkpoint / ".metadata").read_bytes())).load()
        complete = content.keys() >= {"lr_schedulers", "pytorch-lightning_version"}
        return content["global_step"] if complete else None
    except Exception:  # whatever torch raises about a broken file
        return None


def newest(root: Path) -> tuple[Path | None, int]:
    """The newest complete checkpoint of the runs `root/version_*`, and the updates before it."""
    for path in sorted(
        root.glob("version_*[0-9]/checkpoints/*.ckpt"), key=os.path.getmtime, reverse=True
    ):
        count = updates_before(path)
        if count is not None:
            return path, count
    return None, 0
