"""A trace of what this process does, by ``torch.profiler``; Perfetto and chrome://tracing show it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class ProcessTrace:
    """Records this process, between `start` and `write`: operations with the shapes of their inputs, and memory."""

    def __init__(self) -> None:
        self._profile: profile | None = None

    def start(self) -> None:
        """Begin to record."""
        devices = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *devices], record_shapes=True, profile_memory=True)
        self._profile.__enter__()

    def write(self, file: Path | None) -> None:
        """End, and write the trace, a ``.json.gz``; None: it is dropped."""
        assert self._profile
        ended, self._profile = self._profile, None
        ended.__exit__(None, None, None)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            ended.export_chrome_trace(str(file))
