"""Traces of this process by ``torch.profiler``, for Perfetto or chrome://tracing."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)


class ProcessTrace:
    """Records operations, the shapes of their inputs, and memory between `start` and `write`."""

    def __init__(self) -> None:
        self._profile: profile | None = None

    def start(self) -> None:
        devices = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *devices], record_shapes=True, profile_memory=True)
        self._profile.__enter__()

    def write(self, file: Path | None) -> None:
        """Stop recording and write the trace, a ``.json.gz``; None: discard it.

        If the trace cannot be written, a warning is logged.
        """
        assert self._profile
        ended, self._profile = self._profile, None
        ended.__exit__(None, None, None)
        if file is None:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            ended.export_chrome_trace(str(file))
        except OSError as error:
            with suppress(OSError):
                file.unlink()
            reason = error.strerror or error
            logger.warning("%s: the trace cannot be written (%s); the run continues without it", file, reason)
