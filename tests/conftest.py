"""Shared fixtures. Shapes written in `tether.batch` and `tether.algorithms` are checked while tests run."""

import os
from pathlib import Path

from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401  # the hook below names it

install_import_hook(["tether.algorithms"], "tests.typecheck.check")

import pytest  # noqa: E402
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder with gsm8k/ and math/, which is not part of the repository."""
    folder = Path(os.environ.get("TETHER_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}; set TETHER_TEST_DATA")
    return folder
