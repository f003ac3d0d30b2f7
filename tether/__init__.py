"""tether: post-train policies with PPO and its relatives.

::

    run = tether.train("run.yaml", {"trainer.total_training_steps": 60})
    policy = tether.load(run.folder)

Importing this package loads nothing heavy: what these need is imported when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tether.commands.policy import Policy, Response, load
    from tether.commands.python import train
    from tether.commands.result import TrainingResult

__version__ = "0.1.0"
__all__ = ["Policy", "Response", "TrainingResult", "__version__", "load", "train"]

_FOUND_IN = {
    "Policy": "tether.commands.policy",
    "Response": "tether.commands.policy",
    "TrainingResult": "tether.commands.result",
    "load": "tether.commands.policy",
    "train": "tether.commands.python",
}


def __getattr__(name: str) -> Any:
    if name not in _FOUND_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_FOUND_IN[name]), name)
