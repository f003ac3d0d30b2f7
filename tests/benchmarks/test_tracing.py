"""The tracer counts the functions of a folder that were entered, once each, and nothing else."""

import importlib.util
from pathlib import Path

import pytest

from benchmarks.tracing import BEGIN, END, PACKAGE, Steps, Tracer, core, lines_of, lines_of_functions, table, written


def test_functions_of_the_folder_are_counted_once(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "class A:\n    def method(self):\n        return [x for x in range(3)]\n"
        "def outer():\n    A().method()\n    return A().method()\n"
        "def unused():\n    pass\n"
    )
    spec = importlib.util.spec_from_file_location("module", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tracer = Tracer(tmp_path)
    tracer.start()
    module.outer()
    assert tracer.stop() == {(file, "outer"), (file, "A.method")}
    module.unused()  # after the end
    assert tracer.stop() == set()
    assert lines_of({file}) == 8


def test_the_table_counts_what_both_share(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("\n" * 3)
    two.write_text("\n" * 5)
    text, control = Steps(), Steps()
    text.plain = text.whole = frozenset({(one, "f"), (one, "g"), (two, "h")})
    control.plain = control.whole = frozenset({(one, "f"), (two, "i")})
    assert table(text, control)[2:5] == [
        "| a step | text | 2 | 8 | 0 | 3 | 33% |",
        "| a step | control | 2 | 8 | 0 | 2 | 50% |",
        "| a step | shared | 1 | 3 | 0 | 1 | 100% |",
    ]


def test_lines_of_functions_are_counted_once(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_text(
        "class A:\n    def f(self):\n        def g():\n            pass\n        g()\n\n\ndef h():\n    pass\n"
    )
    assert lines_of_functions(frozenset({(file, "A.f"), (file, "A.f.<locals>.g")})) == 4
    assert lines_of_functions(frozenset({(file, "A.f.<locals>.g"), (file, "h")})) == 2 + 2


def test_the_core_leaves_out_models_and_what_samples() -> None:
    steps = {(PACKAGE / "loop/loop.py", "Trainer.step"), (PACKAGE / "text/learning/losses.py", "f")}
    others = {(PACKAGE / "text/models/any.py", "f"), (PACKAGE / "control/collecting/any.py", "f")}
    assert core(frozenset(steps | others)) == steps


def test_a_page_keeps_what_is_around_the_table() -> None:
    assert written(f"before\n{BEGIN}\nold\n{END}\nafter", ["new"]) == f"before\n{BEGIN}\nnew\n{END}\nafter"
    with pytest.raises(ValueError, match="no <!-- trace:begin -->"):
        written("no marks", ["new"])
