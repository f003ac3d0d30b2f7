"""From a configuration to a run, of whichever kind it describes."""

from __future__ import annotations

from tether.assembly.control import build_control_run
from tether.assembly.run import Run, build_run
from tether.config import LoadedConfig


def build(loaded: LoadedConfig) -> Run:
    """Build everything that a run needs, and resume from a checkpoint where ``trainer.resume_mode`` says so.

    Raises:
        ValueError: the inputs are not usable; see the message.
    """
    return build_run(loaded) if loaded.config.env.train.id is None else build_control_run(loaded)
