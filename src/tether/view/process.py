"""Questions that require loading a model or a reward, which another process does, because the viewer loads neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tether.types import JsonObject

TIMEOUT = 900.0
"""Timeout in seconds for another process to load its inputs and answer."""


def run_json_process(module: str, request: JsonObject, about: str) -> Any:
    """Run a module that reads a request as JSON from stdin and writes its answer to stdout, and return the answer.

    Args:
        module: Python module to launch (``python -m MODULE``).
        request: the request.
        about: what is loaded; error messages begin with it.

    Raises:
        ValueError: the process failed (the message has the last line of its error output), or the timeout passed.
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
