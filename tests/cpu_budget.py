"""A pytest plug-in: the default selection has a budget of processor time, and fails when it needs more.

An item may take `ITEM_SECONDS` and all together `TOTAL_SECONDS` on the reference machine. A short computation measures
how much slower this machine is, and scales the limits: before the tests, in all processes at once, as cores that share
a cache or a memory are slower together. Processor time is that of a process and of its children that have ended, so
waiting costs nothing. The limits hold where the whole default selection runs; a run of
some tests is only measured.
"""

import os
import resource
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import pytest
from _pytest.fixtures import FixtureDef

TOTAL_SECONDS = 720  # the goal is 480
ITEM_SECONDS = 6  # the goal is 3
FIXTURE_SECONDS = 30  # of a fixture that several tests share: compiling kernels takes most
CALIBRATION_SECONDS = 0.055  # of `calibration` on the reference machine, an AMD EPYC (Zen 4), quiet
SHOWN = 10
ITEM, FIXTURE, SLOWNESS = "cpu_seconds", "cpu_seconds of fixture ", "slowness"


def cpu_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def calibration() -> float:
    """Return the processor seconds that a fixed computation takes: the fastest of five, of what tests do most."""

    def once() -> float:
        start = time.process_time()
        counts: dict[str, int] = {}
        for i in range(400_000):
            key = f"{i % 1009}"
            counts[key] = counts.get(key, 0) + len(key)
        return time.process_time() - start

    return min(once() for _ in range(5))


@dataclass(eq=False)
class Worker:
    """Measures the items of one process, and sends each one's time with its report."""

    started: float = 0.0
    shared: float = 0.0
    """CPU-seconds in fixtures of modules and sessions since the item began."""
    fixtures: list[tuple[str, float]] = field(default_factory=list)
    inside: bool = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: FixtureDef[object]) -> Generator[None, object, object]:
        """Charge what tests share to the fixture and not to the test that happens to be the first."""
        if fixturedef.scope == "function" or self.inside:
            return (yield)
        self.inside, start = True, cpu_seconds()
        try:
            return (yield)
        finally:
            spent = cpu_seconds() - start
            self.inside = False
            self.shared += spent
            self.fixtures.append((f"{fixturedef.baseid}::{fixturedef.argname}", spent))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """Begin to measure an item."""
        self.started, self.shared = cpu_seconds(), 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the time of set-up and call; teardown, perhaps of a shared fixture, counts in the total alone."""
        report = yield
        if call.when == "call":
            item.user_properties.append((ITEM, cpu_seconds() - self.started - self.shared))
            item.user_properties.extend((FIXTURE + name, spent) for name, spent in self.fixtures)
            report.user_properties = list(item.user_properties)  # --junitxml takes them from the report of the teardown
            self.fixtures.clear()
        return report


@dataclass(eq=False)
class Controller:
    """Adds up what the workers report, and judges it."""

    slowness: float
    enforced: bool
    items: dict[str, float] = field(default_factory=dict)
    fixtures: dict[str, float] = field(default_factory=dict)
    """The dearest set-up of each, as every process makes its own."""

    def pytest_testnodedown(self, node: Any) -> None:
        """Take the slowness that the processes of the tests measured, all at the same time."""
        if hasattr(node, "workeroutput"):  # a process that crashed has none
            self.slowness = max(self.slowness, node.workeroutput[SLOWNESS])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the times of an item."""
        for name, spent in report.user_properties if report.when == "call" else ():
            if name == ITEM:
                self.items[report.nodeid] = spent
            elif name.startswith(FIXTURE):
                fixture = name.removeprefix(FIXTURE)
                self.fixtures[fixture] = max(spent, self.fixtures.get(fixture, 0.0))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Print the verdict as the last line, behind pytest's own, and fail the session by it."""
        yield
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or not self.items:
            return
        spent = sum(
            used.ru_utime + used.ru_stime
            for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )
        everything = self.items | {f"fixture {name}": value for name, value in self.fixtures.items()}
        if len(everything) > SHOWN:
            reporter.write_line(f"the {SHOWN} dearest, in CPU-seconds:")
            for name, value in sorted(everything.items(), key=lambda pair: -pair[1])[:SHOWN]:
                reporter.write_line(f"  {value:6.2f}  {name}")
        problems = self.problems(spent) if self.enforced else []
        for problem in problems:
            reporter.write_line(f"FAILED {problem}", red=True)
        if problems and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        budget = TOTAL_SECONDS * self.slowness
        reporter.write_line(
            f"{spent:.0f} CPU-seconds: {spent / budget:.0%} of the {budget:.0f} that the default selection may take "
            f"({TOTAL_SECONDS} x {self.slowness:.2f}, the slowness of this machine)"
        )

    def problems(self, spent: float) -> list[str]:
        """Return a sentence for each limit that does not hold."""
        found = []
        for times, limit, what in (
            (self.items, ITEM_SECONDS, "an item"),
            (self.fixtures, FIXTURE_SECONDS, "a fixture"),
            ({"all items": spent}, TOTAL_SECONDS, "the default selection"),
        ):
            allowed = limit * self.slowness
            found += [
                f"{name} took {value:.1f} CPU-seconds; {what} may take {allowed:.1f}. Make it cheaper, or mark it slow"
                for name, value in times.items()
                if value > allowed
            ]
        return found


def pytest_configure(config: pytest.Config) -> None:
    """Measure in every process that runs tests; judge in the one that was started."""
    is_worker, is_distributed = hasattr(config, "workerinput"), bool(config.getoption("numprocesses", None))
    if is_worker or not is_distributed:
        config.pluginmanager.register(Worker())
    if is_worker:
        config.workeroutput[SLOWNESS] = calibration() / CALIBRATION_SECONDS
    else:
        is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
        enforced = is_whole and config.option.markexpr == "not slow" and not config.option.collectonly
        config.pluginmanager.register(Controller(max(1.0, calibration() / CALIBRATION_SECONDS), enforced))
