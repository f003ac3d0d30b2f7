"""The table of mutations is up to date, and covers every package and every promise; none is applied here."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.mutations.__main__ import LIVES, ROOT, Mutation, Stale, caught_by, mutations

PACKAGES = {path.name for path in (ROOT / "src/tether").iterdir() if path.is_dir() and path.name != "__pycache__"}
PROMISES = range(1, 8)


def test_every_mutation_can_be_applied_and_names_tests_that_are_there() -> None:
    stale = []
    for mutation in mutations():
        try:
            mutation.applied((ROOT / mutation.file).read_text(encoding="utf-8"))
        except (OSError, Stale) as error:
            stale.append(str(error))
        for test in mutation.tests:
            file, _, function = test.partition("[")[0].partition("::")
            if not (ROOT / file).is_file() or f"def {function}" not in (ROOT / file).read_text(encoding="utf-8"):
                stale.append(f"{mutation.file}: {test} is not there")
    assert stale == []


def test_every_package_and_every_promise_is_broken() -> None:
    table = mutations()
    assert len(table) >= 60
    assert len({(mutation.file, mutation.old, mutation.new) for mutation in table}) == len(table)
    assert {mutation.package for mutation in table} >= PACKAGES
    promises = Counter(mutation.promise for mutation in table)
    assert {promise: promises[promise] for promise in PROMISES if promises[promise] < 4} == {}


def test_a_text_that_is_not_there_once_is_stale() -> None:
    mutation = Mutation("src/tether/any.py", "a == b", "a != b", "nothing", ())
    assert mutation.applied("if a == b:") == "if a != b:"
    for text in ("", "a == b or a == b"):
        with pytest.raises(Stale, match="occurs"):
            mutation.applied(text)


@pytest.mark.slow
def test_a_mutation_is_caught_or_lives_and_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "src/tether").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "src/tether/__init__.py").touch()
    (tmp_path / "pytest.ini").touch()
    file = tmp_path / "src/tether/half.py"
    file.write_text("def half(x):\n    return x / 2  # of a number\n")
    (tmp_path / "tests" / "test_half.py").write_text(
        "from tether.half import half\ndef test_half():\n    assert half(3) == 1.5\n"
    )
    found = {}
    for old, new in (("x / 2", "x // 2"), ("a number", "numbers")):
        mutation = Mutation("src/tether/half.py", old, new, "halves", ("tests/test_half.py",))
        found[new] = caught_by(mutation, tmp_path, search=False)
    assert found == {"x // 2": "tests/test_half.py::test_half", "numbers": LIVES}
    assert "return x / 2  # of a number" in file.read_text()
