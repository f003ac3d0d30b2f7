"""Sets of programming problems: the ground truth of a row is its tests, in the layout of the set.

`extra_info.solution` is a right answer, for `tether reward check`, where the set has one.
"""

from __future__ import annotations

import json

from tether.data.published.row import Convert, Unusable, rule_row, text_in
from tether.rewards import check_truth
from tether.types import JsonObject

READS = "Write a Python program that reads from standard input and prints to standard output."
BLOCK = "Put all of the code into one block that begins with ```python and ends with ```."


def humaneval(record: JsonObject, split: str, number: int) -> JsonObject:
    """A function of HumanEval, to be completed."""
    prompt = text_in(record, "prompt")
    tests = {"prompt": prompt, **{key: text_in(record, key) for key in ("test", "entry_point")}}
    solution = prompt + text_in(record, "canonical_solution")
    return _row(f"Complete this function. {BLOCK}\n\n{_block(prompt)}", "openai/openai_humaneval", tests, split, number,
                solution=_block(solution))  # fmt: skip


def mbpp(record: JsonObject, split: str, number: int) -> JsonObject:
    """A task of MBPP, whose column `text` is `prompt` in the sanitized files; only its tests name the function."""
    asked = text_in(record, "text" if "text" in record else "prompt")
    tests = {key: record[key] for key in ("test_list", "test_setup_code", "test_imports") if record.get(key)}
    shown = "\n".join(map(str, tests.get("test_list", ())))
    return _row(
        f"{asked} {BLOCK} These tests have to pass:\n\n{_block(shown)}",
        "google-research-datasets/mbpp", tests, split, number, solution=_block(text_in(record, "code")),
    )  # fmt: skip


def _contest(source: str) -> Convert:
    """A problem of APPS or TACO: a program that reads and prints, or a function."""

    def convert(record: JsonObject, split: str, number: int) -> JsonObject:
        question, tests = text_in(record, "question"), _decoded(record.get("input_output"))
        if not isinstance(tests, dict):
            raise Unusable("it has no tests")
        name, starter = tests.get("fn_name"), record.get("starter_code")
        solutions = _decoded(record.get("solutions"))
        solution = _block(str(solutions[0])) if isinstance(solutions, list) and solutions else ""
        asked = _asked(question, starter, f"Write a Python function `{name}`." if name else READS)
        from_columns = not isinstance(record.get("input_output"), str)
        return _row(asked, source, tests, split, number, from_columns=from_columns, solution=solution)

    return convert


apps, taco = _contest("codeparrot/apps"), _contest("BAAI/TACO")


def livecodebench(record: JsonObject, split: str, number: int) -> JsonObject:
    """A problem of LiveCodeBench, which publishes no solutions; its private tests stay packed."""
    tests = {key: record.get(key) for key in ("public_test_cases", "private_test_cases", "metadata")}
    asked = _asked(text_in(record, "question_content"), record.get("starter_code"), READS)
    return _row(asked, "livecodebench/code_generation_lite", tests, split, number)


def _asked(question: str, starter: object, otherwise: str) -> str:
    if isinstance(starter, str) and starter.strip():
        return f"{question}\n\nComplete this code. {BLOCK}\n\n{_block(starter)}"
    return f"{question}\n\n{otherwise} {BLOCK}"


def _block(code: str) -> str:
    return f"```python\n{code.rstrip()}\n```"


def _decoded(value: object) -> object:
    """Of a column that holds JSON; None: it is empty, or none."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _row(
    asked: str, source: str, tests: JsonObject, split: str, number: int, *, from_columns: bool = False, **extra: str
) -> JsonObject:
    try:
        check_truth(source, tests, {}, from_columns=from_columns)
    except ValueError as error:
        raise Unusable(str(error)) from error
    return rule_row(asked, source, json.dumps(tests), split, number, "code", **extra)
