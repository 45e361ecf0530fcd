"""Objects as plain values, so that checkpoints hold no pickled code and settings can be hashed."""

import inspect
from dataclasses import fields, is_dataclass
from functools import partial
from types import FrameType
from typing import Any

# by which Lightning makes a module from hyper-parameters that are class paths and arguments
INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"


class Configurable:
    """Remembers the arguments of its constructor in `init_args`."""

    init_args: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any):
        self = super().__new__(cls)
        # partial, because copying an object calls this without arguments
        bound = inspect.signature(cls.__init__).bind_partial(self, *args, **kwargs)
        self.init_args = {name: value for name, value in bound.arguments.items() if name != "self"}
        return self


def plain(value: Any) -> Any:
    """A setting in the form that jsonargparse reads from YAML: an object becomes its class path
    and arguments, a dataclass its fields, a partial or a class what it would make."""
    if isinstance(value, Configurable):
        return class_config(type(value), value.init_args)
    if isinstance(value, partial):
        # jsonargparse hands the class to a function of its own, as the last argument
        made = value.args[-1] if value.args else value.func
        return class_config(made, value.keywords)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None:
        return None
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # jsonargparse makes subclasses, such as PositiveInt
    if isinstance(value, type):
        return class_config(value, {})
    return str(value)


def class_config(kind: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """A class path with its arguments."""
    class_path = f"{kind.__module__}.{kind.__qualname__}"
    return {"class_path": class_path, "init_args": {k: plain(v) for k, v in arguments.items()}}


def save_hyperparameters(module: Any, *ignored: str) -> None:
    """Save the arguments of a module's constructor, which calls this, as plain values: in its
    checkpoints, and for loggers."""
    caller: FrameType = inspect.currentframe().f_back  # type: ignore[union-attr, assignment]
    module.save_hyperparameters(ignore=ignored, frame=caller)
    module.save_hyperparameters({name: plain(value) for name, value in module.hparams.items()})
    module.hparams["_instantiator"] = INSTANTIATOR  # after the loggers' copy was made
