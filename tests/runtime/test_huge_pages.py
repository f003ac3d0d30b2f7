"""A command is re-executed for huge pages only where the environment asks for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tether.runtime.huge_pages import SETTINGS, SWITCH, TUNABLES

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import os, sys
from tether.runtime.huge_pages import restart_with_huge_pages
print("start", flush=True)
restart_with_huge_pages()
print(os.environ.get("GLIBC_TUNABLES"), *sys.argv[1:])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="tunables of glibc")
@pytest.mark.parametrize(
    ("given", "starts", "tunables"),
    [
        ({}, 1, "None"),
        ({SWITCH: "0"}, 1, "None"),
        ({SWITCH: "1"}, 2, SETTINGS[TUNABLES]),
        ({SWITCH: "1", TUNABLES: "glibc.malloc.check=0"}, 1, "glibc.malloc.check=0"),
    ],
)
def test_huge_pages_are_asked_for(given: dict[str, str], starts: int, tunables: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in (TUNABLES, SWITCH)}
    command = [sys.executable, "-c", CODE, "an argument"]
    done = subprocess.run(
        command, env=environment | given | {"PYTHONPATH": f"{ROOT}/src"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["start"] * starts + [f"{tunables} an argument"]
