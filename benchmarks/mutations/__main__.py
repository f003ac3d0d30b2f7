"""Break the code on purpose, one line at a time, and see which test notices.

    python -m benchmarks.mutations [--only WORD ...] [--list] [--search] [--jobs N]

`table.toml` holds the mutations: a file, a text that occurs once in it, the text to put in its place, what that breaks,
and the tests that should fail. They are applied to a copy of the tree, so the checkout stays as it is. The exit status
is 1 where a mutation lives, and 2 where the table is stale: a text or a test is no longer there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from benchmarks.speed.table import grid

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("table.toml")
TIMEOUT, TEST_TIMEOUT = 600, 120  # seconds
TABLES_TEST = "tests/benchmarks/test_mutations.py"
PYTEST = ["-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
NO_TESTS = (4, 5)
"""Exit statuses of pytest where a test does not exist, or none was selected."""
LIVES, UNMUTATED = "LIVES", "fails unmutated: "


class Stale(ValueError):
    """The table names a text or a test that is not there."""


@dataclass(frozen=True)
class Mutation:
    """A change to one file, and the tests that have to notice it."""

    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    """Files or node ids, the cheapest first."""
    promise: int | None = None
    """Number of the promise that it breaks, as in docs/evidence/promises.md."""
    long: bool = False
    """Only a test that is marked slow notices it."""

    @property
    def package(self) -> str:
        """Package of tether, or module beside the packages."""
        return self.file.split("/")[2].removesuffix(".py")

    def applied(self, text: str) -> str:
        """Return the text of the file with the mutation.

        Raises:
            Stale: the old text does not occur exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise Stale(f"{self.file}: {self.old!r} occurs {count} times, not once; bring {TABLE.name} up to date")
        return text.replace(self.old, self.new)


def mutations() -> list[Mutation]:
    """Return the table."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutation"]
    return [Mutation(**row | {"tests": tuple(row["tests"])}) for row in rows]


def copy_tree(folder: Path) -> Path:
    """Copy what git tracks, and what is new and not ignored, as it is in the checkout."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():  # else it was deleted
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def failures(tree: Path, tests: Sequence[str], *, long: bool, all_of_them: bool = False) -> list[str]:
    """Run tests in a copy of the tree; return the node id of the first that fails, or of all.

    Raises:
        Stale: one of the tests does not exist.
    """
    # The table's own test fails for whatever line is changed.
    options = [f"--ignore={TABLES_TEST}", f"--timeout={TEST_TIMEOUT}", "-m", "" if long else "not slow"]
    if not all_of_them:
        options.append("-x")
    process = subprocess.Popen(
        [sys.executable, *PYTEST, *options, *tests], cwd=tree, env=os.environ | {"PYTHONPATH": f"{tree}/src:{tree}"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:  # it may hang in a thread behind the test that failed
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what a test has left behind
    last = ["", *printed.strip().splitlines()][-1]
    if process.returncode in NO_TESTS:
        raise Stale(f"{', '.join(tests)}: {last}; bring {TABLE.name} up to date")
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", printed, re.MULTILINE)
    return failed or [f"{tests[0]}: {last}"] * (process.returncode != 0)


def caught_by(mutation: Mutation, tree: Path, *, search: bool) -> str:
    """Return the test that notices a mutation, or `LIVES`."""
    file = tree / mutation.file
    original = file.read_text(encoding="utf-8")
    file.write_text(mutation.applied(original), encoding="utf-8")
    try:
        found = failures(tree, mutation.tests, long=mutation.long)
        if not found and search:
            folder = f"tests/{mutation.package}"
            found = failures(tree, [folder if (tree / folder).exists() else "tests"], long=mutation.long)
    finally:
        file.write_text(original, encoding="utf-8")
    return found[0] if found else LIVES


def run(chosen: Sequence[Mutation], *, jobs: int, search: bool) -> list[str]:
    """Return what caught each mutation; prints each as it is known."""
    with TemporaryDirectory(prefix="mutations-") as scratch, ThreadPoolExecutor(jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            trees.put(copy_tree(Path(scratch, str(number))))

        def judge(mutation: Mutation) -> str:
            tree, begun = trees.get(), time.monotonic()
            try:
                found = caught_by(mutation, tree, search=search)
            except Stale as error:
                found = f"STALE: {error}"
            finally:
                trees.put(tree)
            print(f"{time.monotonic() - begun:4.0f} s  {mutation.file}: {mutation.breaks}: {found}", flush=True)
            return found

        found = list(pool.map(judge, chosen))
        return without_broken_tests(found, trees.get(), long=any(mutation.long for mutation in chosen))


def without_broken_tests(found: list[str], tree: Path, *, long: bool) -> list[str]:
    """Mark what a test has caught that fails without a mutation, too."""
    catchers = sorted({one.partition("[")[0] for one in found if one.startswith("tests/") and "::" in one})
    broken = failures(tree, catchers, long=long, all_of_them=True) if catchers else []
    return [f"{UNMUTATED}{one}" if one in broken else one for one in found]


def main() -> int:
    """Apply the chosen mutations, and print the table of what caught them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mutations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="WORD", help="those with a word in file, old text or description")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    parser.add_argument(
        "--search", action="store_true", help="where the named tests pass, run tests/<package>, or else all tests"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutations at a time, each in its own copy")
    given = parser.parse_args()
    chosen = [
        one for one in mutations() if any(word in f"{one.file} {one.old} {one.breaks}" for word in given.only or [""])
    ]
    if given.list:
        rows = [[one.file, str(one.promise or ""), one.breaks, " ".join(one.tests)] for one in chosen]
        print("\n".join(grid(("file", "promise", "breaks", "tests"), rows)))
        return 0
    begun = time.monotonic()
    found = run(chosen, jobs=given.jobs, search=given.search)
    rows = [[one.file, str(one.promise or ""), one.breaks, caught] for one, caught in zip(chosen, found, strict=True)]
    print("\n" + "\n".join(grid(("file", "promise", "breaks", "caught by"), rows)))
    living = sum(one == LIVES or one.startswith(UNMUTATED) for one in found)
    stale = sum(one.startswith("STALE") for one in found)
    minutes = (time.monotonic() - begun) / 60
    print(f"\n{len(found)} mutations in {minutes:.0f} minutes: {living} live, {stale} are stale")
    return 2 if stale else int(living > 0)


if __name__ == "__main__":
    sys.exit(main())
