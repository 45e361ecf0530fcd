"""Files of predictions, which every trainer gets; and what a user may leave out: export,
TensorBoard's extras, speed, signals."""

from topr import lazy

__getattr__ = lazy(
    __name__,
    board=["TensorBoardExtras"],
    export=["ExportPolicy"],
    predictions=["PredictionWriter"],
    preemption=["Preemption"],
    speed=["Speed"],
)
