"""The command that compiles kernels ahead, of which the set-up scripts say that no run has to wait for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tether.kernels.precompile import kernel_modules


@pytest.mark.slow
def test_each_kernel_is_left_on_the_disk(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-m", "tether.kernels.precompile"], env=environment, check=True)
    compiled = {path.name.split(".")[0] for path in tmp_path.rglob("*.nbc")}
    assert compiled == {module.__name__.rpartition(".")[2] for module in kernel_modules()}
