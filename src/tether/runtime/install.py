"""How to install what is missing: tether is on no package index, so that a clone is named by its folder."""

from __future__ import annotations

from pathlib import Path

SOURCE = Path(__file__).resolve().parents[3]
"""The clone, where tether is installed from one in editable form; else a folder of the environment."""


def pip_install(extra: str) -> str:
    """Return the command that adds an extra to this installation."""
    if not (SOURCE / "pyproject.toml").is_file():
        return f"pip install 'tether[{extra}]'"
    return f"pip install -e '{'.' if Path.cwd() == SOURCE else SOURCE}[{extra}]'"
