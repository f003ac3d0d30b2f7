"""The file from which `tether status` shows the servers of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tether.text.servers.protocol import SamplingServer


@dataclass
class _Entry:
    state: str
    since: float
    failures: int = 0
    last_failure: str = ""


@dataclass
class ServersStatus:
    """Writes the state of each server when it changes.

    Args:
        file: the file; None writes none.
    """

    file: Path | None
    _entries: dict[SamplingServer, _Entry] = field(default_factory=dict, init=False)

    def report(self, servers: Sequence[SamplingServer], state: str) -> None:
        """Write the state of some servers."""
        for server in servers:
            entry = self._entries.setdefault(server, _Entry(state, time.time()))
            if entry.state != state:
                entry.state, entry.since = state, time.time()
        self._write()

    def report_failure(self, server: SamplingServer, error: str) -> None:
        """Write that a server has failed, and is being restarted or gets its weights again."""
        entry = self._entries.setdefault(server, _Entry("", 0.0))
        entry.failures, entry.last_failure = entry.failures + 1, error
        self.report([server], "recovering")

    def _write(self) -> None:
        if self.file is None:
            return
        servers = [{"server": server.url, **vars(entry)} for server, entry in self._entries.items()]
        with suppress(OSError):  # a full disk must not end the run here
            new_file = self.file.with_suffix(".new")
            new_file.write_text(json.dumps({"time": time.time(), "servers": servers}))
            new_file.replace(self.file)
