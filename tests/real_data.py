"""The folder with gsm8k/ and math/, which is not in the repository: where it exists, no test that needs it skips."""

import os
from collections.abc import Generator
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("TETHER_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder; the test is skipped where there is none."""
    if not FOLDER.is_dir():
        pytest.skip(f"no test data at {FOLDER}; set TETHER_TEST_DATA")
    return FOLDER


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test on real data that skips beside the data has failed: nobody would notice otherwise."""
    report = yield
    if report.skipped and "test_data" in getattr(item, "fixturenames", ()) and FOLDER.is_dir():
        report.outcome, report.longrepr = "failed", f"skipped although {FOLDER} exists: {report.longrepr}"
    return report
