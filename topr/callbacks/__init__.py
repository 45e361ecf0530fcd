"""What happens around the updates: logging, sampling and grading, export, exact resumption. `trainer` is a
`lightning.Trainer` and `module` a `PolicyModule`, both annotated `Any`: Lightning's types lack what they hold."""

from topr.callbacks.evaluate import Evaluate, ExportPolicy
from topr.callbacks.monitor import Monitor
from topr.callbacks.resume import AtomicCheckpointIO, ExactResume
