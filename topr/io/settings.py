"""Objects as plain values, so that checkpoints hold no pickled code and settings can be hashed."""

import inspect
import json
from dataclasses import is_dataclass
from functools import partial

# by which Lightning makes a module from hyper-parameters that are class paths and arguments
INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"


class Configurable:
    """Remembers the arguments of its constructor in `init_args`."""

    init_args: dict

    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        # partial, because copying an object calls this without arguments
        self.init_args = (
            inspect.signature(cls.__init__).bind_partial(self, *args, **kwargs).arguments
        )
        del self.init_args["self"]
        return self


def plain(value):
    """A setting in the form that jsonargparse reads from YAML: see `describe`."""
    return json.loads(json.dumps(value, default=describe))


def class_of(value):
    """The class of an object, or what a partial would call."""
    if isinstance(value, partial):
        # jsonargparse hands the class to a function of its own, as the last argument
        return [value.func, *value.args][-1]
    return type(value)


def describe(value):
    """What stands for a value that JSON does not know: class path and arguments of an object, the
    fields of a dataclass, the class that a partial would make."""
    kind, arguments = class_of(value), {}
    if isinstance(value, Configurable):
        arguments = value.init_args
    elif isinstance(value, partial):
        arguments = value.keywords
    elif isinstance(value, type):
        kind = value
    else:
        if isinstance(value, set | frozenset):
            return sorted(map(str, value))  # their own order differs from process to process
        return vars(value) if is_dataclass(value) else str(value)
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": arguments}


def save_hyperparameters(module, *ignored: str):
    """Save the arguments of a module's constructor, which calls this, as plain values: in its
    checkpoints, and for loggers."""
    caller = inspect.currentframe().f_back  # type: ignore[union-attr]
    module.save_hyperparameters(ignore=ignored, frame=caller)
    module.hparams.pop("_instantiator", None)  # by LightningCLI; loggers would show it
    module.save_hyperparameters(plain(dict(module.hparams)))
    module.hparams["_instantiator"] = INSTANTIATOR  # after the loggers' copy was made
