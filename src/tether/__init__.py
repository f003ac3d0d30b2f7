"""tether: post-train policies with PPO and its relatives.

::

    run = tether.train("run.yaml", {"trainer.total_training_steps": 60})
    policy = tether.load(run.folder)

Importing this package is cheap: heavy dependencies are imported on first use. It configures how PyTorch's threads wait,
so import it before torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tether.runtime.threads import limit_spinning

if TYPE_CHECKING:
    from tether.commands.policy import Policy, Response, load
    from tether.commands.python import train
    from tether.commands.result import TrainingResult

limit_spinning()
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
