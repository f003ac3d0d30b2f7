"""Commands that install missing packages.

tether is on no package index, where anybody could register its name, so the commands name the origin of this
installation.
"""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

SOURCE = Path(__file__).resolve().parents[3]
"""The clone, if tether is installed from one in editable mode; otherwise a folder of the environment."""
IS_CLONE = (SOURCE / "pyproject.toml").is_file()


def pip_arguments(extra: str) -> list[str]:
    """Return the arguments of ``pip install`` that add an extra to this installation."""
    if IS_CLONE:
        return ["-e", f"{'.' if Path.cwd() == SOURCE else SOURCE}[{extra}]"]
    origin = json.loads(_metadata("direct_url.json") or "{}")
    url = str(origin.get("url", ""))
    if not url:
        return [f"tether[{extra}]"]
    if url.startswith("file:"):
        return [f"{unquote(urlsplit(url).path)}[{extra}]"]
    vcs = origin.get("vcs_info")
    return [f"tether[{extra}] @ {vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else f"tether[{extra}] @ {url}"]


def pip_install(extra: str) -> str:
    """Return the command that adds an extra to this installation."""
    pip = "uv pip" if (_metadata("INSTALLER") or "").strip() == "uv" else "pip"
    return f"{pip} install {shlex.join(pip_arguments(extra))}"


def _metadata(file: str) -> str | None:
    """Return the text of an installer's metadata file, which an editable install has outside of the package."""
    installed = distributions(name="tether", path=[str(Path(__file__).parents[2]), *sys.path])
    return next((text for each in installed if (text := each.read_text(file))), None)
