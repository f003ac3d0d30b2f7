"""Builds the run that a configuration describes, for text or control."""

from __future__ import annotations

from collections.abc import Callable

from tether.config import LoadedConfig
from tether.loop.run import Run
from tether.runtime.user_files import forget_imports


def build(loaded: LoadedConfig, begin: Callable[[str], None] = lambda activity: None) -> Run:
    """Build everything that a run needs, and resume from a checkpoint according to ``trainer.resume_mode``.

    Args:
        loaded: the configuration of the run.
        begin: called with a description of each activity that starts.

    Raises:
        ValueError: inputs of the run, such as data or models, are unusable.
    """
    forget_imports()
    if loaded.config.sft.enable:
        begin("loading transformers")
        from tether.text.supervised import build_supervised_run

        return build_supervised_run(loaded, begin)
    if loaded.config.env.train.id is None:
        begin("loading transformers")
        from tether.text.build import build_run

        return build_run(loaded, begin)
    begin("making environments and models")
    from tether.control.build import build_control_run

    return build_control_run(loaded)
