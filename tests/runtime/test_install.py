"""The command that adds an extra works where tether is installed from a clone, and from a wheel."""

import runpy
import shutil
from pathlib import Path

import pytest

from tether.runtime import install

ROOT = Path(__file__).resolve().parents[2]


def test_a_clone_is_named_by_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert install.pip_install("ray") == "pip install -e '.[ray]'"
    monkeypatch.chdir(tmp_path)
    assert install.pip_install("ray") == f"pip install -e '{ROOT}[ray]'"


def test_a_wheel_is_named_by_the_package(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages/tether/runtime"
    folder.mkdir(parents=True)
    copy = runpy.run_path(shutil.copy(install.__file__, folder))
    assert copy["pip_install"]("ray") == "pip install 'tether[ray]'"
