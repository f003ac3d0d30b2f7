"""A test on real data may only skip where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(("there", "code"), [(True, 1), pytest.param(False, 0, marks=pytest.mark.slow)])
def test_a_skip_beside_the_data_is_a_failure(tmp_path: Path, there: bool, code: int) -> None:
    case = tmp_path / "test_case.py"
    case.write_text("import pytest\ndef test_rows(test_data):\n    pytest.skip('no parquet')\n")
    environment = os.environ | {"TETHER_TEST_DATA": str(tmp_path if there else tmp_path / "none")}
    command = [sys.executable, "-m", "pytest", "-p", "tests.real_data", "-p", "no:cacheprovider", str(case)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout
    assert ("skipped although" in done.stdout) == there
