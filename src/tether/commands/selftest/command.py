"""Runs the checks, prints a line for each and writes the report."""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from tether import __version__
from tether.commands.doctor import CORE, EXTRAS
from tether.commands.selftest.checks import CHECKS
from tether.commands.selftest.results import Check, CheckContext, CheckOutcome, failed
from tether.kernels import backend
from tether.runtime.disk import summarize_error, writing
from tether.runtime.machine import resolve_device
from tether.runtime.terminal import Screen, one_line
from tether.runtime.threads import num_threads, usable_cores

SIGNS = {"pass": "pass", "fail": "FAIL", "not applicable": "n/a"}


@dataclass(frozen=True)
class CheckReport:
    """The outcome of a check."""

    name: str
    status: str
    detail: str
    fix: str
    """How to fix it; empty unless the check failed."""
    seconds: float
    traceback: str = ""

    def line(self) -> str:
        """Return the outcome as one line."""
        needs = "needs " if self.status == "not applicable" else ""
        fix = f" Fix: {self.fix}." if self.fix else ""
        return f"{SIGNS[self.status]:4}  {self.name} ({self.seconds:.1f} s): {needs}{one_line(self.detail)}{fix}"


def selftest(*, quick: bool, report: Path | None, as_json: bool, checks: Sequence[Check] = CHECKS) -> bool:
    """Run the checks and return whether none failed.

    Args:
        quick: whether to run only the checks that together take about a minute.
        report: file for versions, devices, all lines and tracebacks; None: no file.
        as_json: whether to print the report as JSON instead of lines.
        checks: the checks to choose from.

    Raises:
        ValueError: the report cannot be written.
    """
    disable_progress_bar()
    screen = Screen()
    facts = {**_versions(), **_machine()}
    if not as_json:
        for name, value in facts.items():
            screen.print(f"{name}: {value}", style="dim", soft_wrap=True)
    findings: list[CheckReport] = []
    _write(report, facts, findings)
    with tempfile.TemporaryDirectory(prefix="tether-selftest-") as folder, _fixed_threads():
        device = _device()
        context = CheckContext(device, Path(folder), quick=quick)
        for check in checks:
            if quick and not check.quick:
                continue
            findings.append(_checked(check, context))
            if not as_json:
                screen.print(
                    findings[-1].line(), style="bold red" if findings[-1].status == "fail" else "", soft_wrap=True
                )
            _write(report, facts, findings)
    counts = {status: sum(finding.status == status for finding in findings) for status in SIGNS}
    if as_json:
        print(json.dumps({"facts": facts, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        where = f"; the report is {report}" if report else ""
        screen.print(f"{summary} in {sum(finding.seconds for finding in findings):.0f} s{where}", soft_wrap=True)
    return counts["fail"] == 0


def _checked(check: Check, context: CheckContext) -> CheckReport:
    """Run a check; any exception counts as its failure."""
    start, trace = time.perf_counter(), ""
    try:
        outcome = check.run(context)
    except Exception as error:  # noqa: BLE001 - a broken machine raises anything
        outcome, trace = _raised(error), traceback.format_exc()
    fix = check.fix if outcome.status == "fail" else ""
    return CheckReport(check.name, outcome.status, outcome.detail, fix, time.perf_counter() - start, trace)


def _raised(error: Exception) -> CheckOutcome:
    return failed(summarize_error(error))


def _device() -> torch.device:
    """Return the device of a run; the CPU if CUDA is present but does not work."""
    device = resolve_device("auto")
    try:
        float(torch.ones(2, device=device).sum())
    except (RuntimeError, AssertionError):  # AssertionError is raised by a torch without CUDA
        return torch.device("cpu")
    return device


@contextmanager
def _fixed_threads() -> Iterator[None]:
    """Use as many threads as a run; runs in this process also set them."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _versions() -> dict[str, str]:
    facts = {"tether": __version__, "python": f"{platform.python_version()} ({sys.executable})"}
    facts["platform"] = platform.platform()
    packages = []
    for name in (*CORE, *EXTRAS):
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return facts | {"packages": ", ".join(packages)}


def _machine() -> dict[str, str]:
    """Return device, dtype and kernels; facts that cannot be determined are listed as such."""
    facts = {"processor": f"{_processor()}, {usable_cores()} cores for this process"}
    try:
        gpus = [
            f"{(p := torch.cuda.get_device_properties(index)).name} ({p.total_memory / 2**30:.0f} GiB)"
            for index in range(torch.cuda.device_count())
        ]
        driver = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a torch without CUDA"
        facts["GPUs"] = ", ".join(gpus) or f"none ({driver})"
        device = resolve_device("auto")
        if _device() != device:
            facts["GPUs"] += f"; {device} does not compute, so the CPU is checked"
        dtype = CheckContext(_device(), Path()).dtype
        facts["runs here"] = f"{_device()} in {dtype}, kernels: {backend(_device().type, dtype).describe()}"
    except (RuntimeError, ValueError, AssertionError, OSError) as error:
        facts["device"] = f"cannot be asked ({summarize_error(error)})"
    return facts


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.machine()


def _write(report: Path | None, facts: dict[str, str], findings: Sequence[CheckReport]) -> None:
    """Write the results so far, so that a crash does not lose them."""
    if report is None:
        return
    lines = [f"{name}: {value}" for name, value in facts.items()]
    lines += ["", *(finding.line() for finding in findings)]
    for finding in findings:
        if finding.traceback:
            lines += ["", f"--- {finding.name}", finding.traceback]
    with writing(report, "Name another file with --report."):
        report.write_text("\n".join(lines) + "\n")
