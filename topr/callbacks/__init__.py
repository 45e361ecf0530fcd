"""What a user may leave out: export, TensorBoard's extras, speed, signals."""

from topr import lazy

__getattr__ = lazy(
    __name__,
    board=["TensorBoardExtras"],
    export=["ExportPolicy"],
    preemption=["Preemption"],
    speed=["Speed"],
)
