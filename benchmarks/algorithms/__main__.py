"""Does every algorithm learn? Small tasks through the trainer of tether, three seeds or more each, as a table.

    python -m benchmarks.algorithms                              # everything: about ten minutes on two cores
    python -m benchmarks.algorithms --quick                      # a few rows
    python -m benchmarks.algorithms --only gae 'policy loss'     # rows or groups by name
    python -m benchmarks.algorithms --write docs/evidence/learning.md  # and draws docs/assets/learning.png

One process a core, one thread each. Ends with 1 if a row misses its bound. Runs that are broken on purpose, and methods
that a task is made to defeat, have an upper bound: the table would be worthless if they learned.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.algorithms.cases import all_cases
from benchmarks.algorithms.report import PICTURE, core_minutes, draw, markdown, text_table
from benchmarks.algorithms.runs import run_all
from benchmarks.resumable import write_between
from tether.runtime.threads import usable_cores

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few rows of each kind")
    parser.add_argument("--only", nargs="+", help="names of rows or of groups")
    parser.add_argument("--processes", type=int, default=usable_cores())
    parser.add_argument(
        "--write", type=Path, help="page whose results block is filled; the picture goes to docs/assets"
    )
    parser.add_argument(
        "--results", type=Path, help="keep each run in this folder, and go on from those that are there"
    )
    arguments = parser.parse_args()
    cases = [case for case in all_cases() if case.quick or not arguments.quick]
    if arguments.only:
        cases = [case for case in cases if {case.name, case.group} & set(arguments.only)]
    if arguments.results:
        arguments.results.mkdir(parents=True, exist_ok=True)
    rows = run_all(cases, arguments.processes, arguments.results)
    print(text_table(rows))
    failed = [row.case.name for row in rows if not row.passed]
    print(f"\n{len(rows) - len(failed)} of {len(rows)} rows pass, {core_minutes(rows):.1f} minutes of one core")
    if arguments.write:
        write_between(arguments.write, BEGIN, END, markdown(rows))
        draw(rows, arguments.write.parent.parent / "assets" / PICTURE)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
