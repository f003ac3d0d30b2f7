"""Runs another program under a guard: it and its descendants end when their owner ends, even by kill -9."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp

from tether.runtime.channel import Channel
from tether.runtime.install import IS_CLONE, SOURCE
from tether.runtime.supervised import SupervisedProcess


def start_program(
    command: Sequence[str], log: Path, environment: Mapping[str, str], folder_variable: str | None = None
) -> SupervisedProcess:
    """Start a program without the Python settings of this process's environment.

    Args:
        command: the program and its arguments.
        log: file to which its output is appended.
        environment: variables to add to those of this process.
        folder_variable: a variable to set to a temporary folder, which is removed when the program ends.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    folder = mkdtemp(prefix="tether-") if folder_variable else ""
    variables = {**environment, **({folder_variable: folder} if folder_variable else {})}
    process = SupervisedProcess.spawn("tether.runtime.program:become", folder=folder)
    process.send(json.dumps([list(command), str(log), variables]).encode(), timeout=60)
    return process


def become(channel: Channel) -> None:
    """Replace this process by the program in the first message; runs in the worker of `start_program`."""
    message = channel.receive()
    if message is None:
        return
    command, log, environment = json.loads(message)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(written, 1)
    os.dup2(written, 2)
    ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    os.execve(command[0], command, {k: v for k, v in os.environ.items() if k not in ours} | environment)


def environment_of(name: str, variable: str) -> Path:
    """Return the Python of a separate environment, in the folder of an environment variable or in ``.venv-NAME``.

    Raises:
        ValueError: there is no such environment.
    """
    named = os.environ.get(variable)
    folders = [Path(named)] if named else [Path(f".venv-{name}"), *([SOURCE / f".venv-{name}"] if IS_CLONE else [])]
    for place in folders:
        if (python := place.expanduser().absolute() / "bin/python").exists():
            return python
    looked = f"{variable}={named}" if named else " and ".join(map(str, dict.fromkeys(p.absolute() for p in folders)))
    raise ValueError(f"{name} runs in an environment of its own, and none is at {looked}")
