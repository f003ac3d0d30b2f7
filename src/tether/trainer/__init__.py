"""The training loop (`loop`), the protocols that it calls (`protocol`), checkpoints and callbacks.

`text` and `control` implement the protocols for the two kinds of policy; `parts` has the steps of the loop that a
configuration enables.
"""

from tether.trainer.ahead import SamplingAhead, SourceAhead
from tether.trainer.callbacks import Callbacks
from tether.trainer.checkpoint import (
    Persistence,
    check_identity,
    check_saving,
    model_fingerprint,
    object_fingerprint,
    write_run_yaml,
)
from tether.trainer.loop import OldLogProbs, Schedule, Trainer
from tether.trainer.protocol import EvaluationResult
from tether.trainer.saver import Saver

__all__ = [
    "Callbacks",
    "EvaluationResult",
    "OldLogProbs",
    "Persistence",
    "SamplingAhead",
    "Saver",
    "Schedule",
    "SourceAhead",
    "Trainer",
    "check_identity",
    "check_saving",
    "control",
    "model_fingerprint",
    "object_fingerprint",
    "parts",
    "preflight",
    "text",
    "write_run_yaml",
]
