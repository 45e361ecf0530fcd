"""What a user may leave out: files of predictions, export, TensorBoard's extras, speed, signals."""

from topr import lazy

__getattr__ = lazy(
    __name__,
    board=["TensorBoardExtras"],
    export=["ExportPolicy"],
    predictions=["PredictionWriter"],
    preemption=["Preemption"],
    speed=["Speed"],
)
