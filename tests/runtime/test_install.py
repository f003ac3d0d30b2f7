"""The command that adds an extra works where tether is installed from a clone, and from a wheel."""

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tether.runtime import install

ROOT = Path(__file__).resolve().parents[2]


def test_a_clone_is_named_by_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert install.pip_install("ray") == "pip install -e '.[ray]'"
    monkeypatch.chdir(tmp_path)
    assert install.pip_install("ray") == f"pip install -e '{ROOT}[ray]'"


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., str]:
    """The command that an installation in site-packages prints, by what its installer wrote."""

    def of(origin: object, installer: str = "pip") -> str:
        folder, written = tmp_path / "lib/tether/runtime", tmp_path / "lib/tether-0.1.0.dist-info"
        for each in (folder, written):
            each.mkdir(parents=True, exist_ok=True)
        (written / "METADATA").write_text("Name: tether\nVersion: 0.1.0\n")
        (written / "INSTALLER").write_text(f"{installer}\n")
        (written / "direct_url.json").write_text(json.dumps(origin))
        return str(runpy.run_path(shutil.copy(install.__file__, folder))["pip_install"]("ray"))

    return of


def test_what_was_installed_is_named_by_where_it_came_from(command: Callable[..., str]) -> None:
    wheel = "/tmp/my wheels/tether-0.1.0-py3-none-any.whl"
    origin = {"url": "file:///tmp/my%20wheels/tether-0.1.0-py3-none-any.whl", "archive_info": {}}
    assert command(origin) == f"pip install '{wheel}[ray]'"
    assert command(origin, "uv") == f"uv pip install '{wheel}[ray]'"
    vcs = {"url": "https://host/tether.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    assert command(vcs) == "pip install 'tether[ray] @ git+https://host/tether.git@abc'"
    assert command({"url": "https://host/t.whl"}) == "pip install 'tether[ray] @ https://host/t.whl'"
    assert command({}) == "pip install 'tether[ray]'"  # from an index, where tether is then published
