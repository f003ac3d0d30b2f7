"""From a configuration to a run, of whichever kind it describes."""

from __future__ import annotations

from tether.assembly.common import Run
from tether.config import LoadedConfig
from tether.runtime.user_files import forget_imports


def build(loaded: LoadedConfig) -> Run:
    """Build everything that a run needs, and resume from a checkpoint where ``trainer.resume_mode`` says so.

    Raises:
        ValueError: the inputs are not usable; see the message.
    """
    forget_imports()
    if loaded.config.env.train.id is None:
        from tether.assembly.run import build_run  # loads transformers, which takes seconds

        return build_run(loaded)
    from tether.assembly.control import build_control_run

    return build_control_run(loaded)
