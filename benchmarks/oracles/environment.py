"""The environment of the peers: made here, thrown away at will, never that of tether.

It is a virtual environment that sees the packages of the interpreter that runs this script, by a .pth file: torch,
transformers and tensordict are the ones that tether is tested with (constraints.txt; a CPU build stays one). Into it go
the peers, without their dependencies, and the few small packages that their algorithm modules import. A peer may ask
for other versions of the shared ones; the functions compared here are plain torch, so that what imports also counts.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NEEDED = {
    "verl": ("ray", "codetiming", "torchdata", "orjson", "dill"),
    "trl": (),
    "openrlhf": ("torchdata", "einops", "pylatexenc"),
    "torchrl": ("hoptorch", "pyvers", "cloudpickle"),
    "rlinf": ("ray", "sortedcontainers", "einops", "debugpy"),
}
"""Peer -> what its algorithm modules import besides the packages of tether."""


def make(folder: Path) -> Path:
    """Make the environment, if it is not there; returns its interpreter."""
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=False, symlinks=True)
        parent = sysconfig.get_path("purelib")
        site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        Path(site, "packages_of_tether.pth").write_text(f"{parent}\n")
    return python


def install(python: Path, peer: str) -> str | None:
    """Install a peer without its dependencies, and what it needs; returns what went wrong, or None."""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    for command in ([*pip, "--no-deps", peer], [*pip, *NEEDED[peer]])[: 1 + bool(NEEDED[peer])]:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return last_line(done.stderr)
    return None


def last_line(text: str) -> str:
    """Return the last line that says something: of pip and of Python the one with the error."""
    lines = [line for line in text.splitlines() if line.strip() and "notice" not in line]
    return lines[-1].strip() if lines else "no message"


def run_worker(python: Path, peer: str) -> tuple[str | None, str]:
    """Run a peer's checks in the environment; returns its results as JSON, or None and what went wrong."""
    command = [str(python), "-m", "benchmarks.oracles.worker", peer]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        return None, last_line(done.stderr)
    return done.stdout.splitlines()[-1], ""
