"""Kills, hostile rewards and bad files: python -m benchmarks chaos [--kills N] [--write PAGE]
Faults of a run on several devices:   python -m benchmarks chaos --ranks [--faults N] [--write PAGE]
Faults of a run that samples by vLLM: python -m benchmarks chaos --servers [--faults N] [--write PAGE]

The pages are reliability.md, several-devices.md and servers.md in docs/evidence.

Everything is tiny, so that what is measured is what is lost, and nothing else: survived of tried, and lost bits.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from benchmarks.chaos import files, kills, rewards, servers
from benchmarks.resumable import write_between
from benchmarks.speed.machine import machine_line

BEGIN, END = "<!-- chaos:begin -->", "<!-- chaos:end -->"


def main(given: Sequence[str] | None = None) -> None:
    """Run the soak, print its table, and write it between the marks of a page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="about so many, over all kinds of runs")
    parser.add_argument("--ranks", action="store_true", help="only faults of ranks, nodes, disk, driver")
    parser.add_argument("--servers", action="store_true", help="only faults of servers that sample, and of the trainer")
    parser.add_argument("--stand-in", action="store_true", help="with a stand-in of vLLM, not vLLM itself")
    parser.add_argument("--faults", type=int, default=36, help="of these so many")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds after which a server hangs")
    parser.add_argument("--write", type=Path, help="also write the table between the marks of this page")
    arguments = parser.parse_args(given)
    os.environ["TQDM_DISABLE"] = "1"  # bars of the runs that are killed
    if arguments.ranks or arguments.servers:
        _disturb(arguments)
        return
    began, lines, complaints = time.perf_counter(), ["tried                survived  lost bits  what"], list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what, measure in (("bad data files", files.measure), ("hostile reward functions", rewards.measure)):
            (folder / what).mkdir()
            survived, tried, failures = measure(folder / what)
            _show(lines, f"{tried:>5} {what.split()[-1]:<16} {survived:>6}          -  {what}")
            complaints += failures
        for result in kills.measure(folder / "kills", arguments.kills):
            line = f"{result.kills:>5} kill -9         {result.survived:>7}  {result.bits_lost:>9}  {result.case.name}"
            _show(lines, line)
    lines += complaints
    print("\n".join(complaints))
    if arguments.write:
        _write(arguments.write, "chaos", "```text\n" + "\n".join(lines) + "\n```", began)
    if complaints:
        raise SystemExit(1)


def _disturb(arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        if arguments.ranks:
            command = "chaos --ranks"
            result = importlib.import_module("benchmarks.chaos.ranks").measure(
                Path(name), arguments.faults
            )  # needs Ray
        else:
            command = f"chaos --servers{' --stand-in' if arguments.stand_in else ''}"
            result = servers.measure(Path(name), arguments.faults, arguments.timeout, stand_in=arguments.stand_in)
    print(result.markdown(), *(command[:200] for command in result.left), sep="\n")
    if arguments.write:
        _write(arguments.write, f"{command} --faults {arguments.faults}", result.markdown(), began)
    if not result.is_fine:
        raise SystemExit(1)


def _write(page: Path, command: str, table: str, began: float) -> None:
    """Write a table between the marks of a page."""
    minutes = (time.perf_counter() - began) / 60
    note = f"`python -m benchmarks {command}`, {minutes:.0f} minutes, {date.today()}: {machine_line()}."
    write_between(page, BEGIN, END, f"{table}\n\n{note}")


def _show(lines: list[str], line: str) -> None:
    if len(lines) == 1:
        print(lines[0])
    print(line, flush=True)
    lines.append(line)


if __name__ == "__main__":
    main()
