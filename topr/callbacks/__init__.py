"""What happens around the updates: logging, sampling and grading, export, exact resumption.

Not here: the loss and its reduction (`topr/module.py`). In the hooks, `trainer` is a `lightning.Trainer` and `module` a
`PolicyModule`; both are annotated `Any`, since Lightning's annotations lack most of what they hold.
"""

from topr.callbacks.evaluate import Evaluate, ExportPolicy
from topr.callbacks.monitor import Monitor
from topr.callbacks.resume import AtomicCheckpointIO, ExactResume
