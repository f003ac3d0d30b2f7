"""Questions for which a model or a reward has to be loaded: another process answers them, as the viewer loads none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tether.types import JsonObject

TIMEOUT = 900.0
"""Seconds in which another process must have loaded what it needs, and answered."""


def ask_process(module: str, request: JsonObject, about: str) -> Any:
    """Return the answer of a module that reads a request as JSON from its stdin and writes its answer to its stdout.

    Args:
        module: is run as ``python -m``.
        request: the request.
        about: what is loaded, which errors begin with.

    Raises:
        ValueError: it failed, with the last line of its error output; or the time is over.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps(request),
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{about}: no answer in {TIMEOUT:g} s; is the machine out of memory?") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"{about}: {reason}")
    return json.loads(done.stdout)
