"""Datasets of programming problems: the ground truth of a row is its tests, in the dataset's own format.

`extra_info.solution` is a correct answer for `tether reward check`, if the dataset has one.
"""

from __future__ import annotations

import json

from tether.integrations.hubs.row import Convert, Unusable, rule_row, text_in
from tether.text.rewards.router import check_truth
from tether.types import JsonObject

READS = "Write a Python program that reads from standard input and prints to standard output."
BLOCK = "Put all of the code into one block that begins with ```python and ends with ```."


def humaneval(record: JsonObject, split: str, index: int) -> JsonObject:
    """Convert a problem of HumanEval, a function to complete."""
    prompt = text_in(record, "prompt")
    tests = {"prompt": prompt, **{key: text_in(record, key) for key in ("test", "entry_point")}}
    solution = prompt + text_in(record, "canonical_solution")
    return _row(f"Complete this function. {BLOCK}\n\n{_block(prompt)}", "openai/openai_humaneval", tests, split, index,
                solution=_block(solution))  # fmt: skip


def mbpp(record: JsonObject, split: str, index: int) -> JsonObject:
    """Convert a task of MBPP. In sanitized files the column `text` is `prompt`; only the tests name the function."""
    prompt = text_in(record, "text" if "text" in record else "prompt")
    tests = {key: record[key] for key in ("test_list", "test_setup_code", "test_imports") if record.get(key)}
    shown = "\n".join(map(str, tests.get("test_list", ())))
    return _row(
        f"{prompt} {BLOCK} These tests have to pass:\n\n{_block(shown)}",
        "google-research-datasets/mbpp", tests, split, index, solution=_block(text_in(record, "code")),
    )  # fmt: skip


def _contest(source: str) -> Convert:
    """Return a converter for APPS or TACO problems: programs with input and output, or functions."""

    def convert(record: JsonObject, split: str, index: int) -> JsonObject:
        question, tests = text_in(record, "question"), _decoded(record.get("input_output"))
        if not isinstance(tests, dict):
            raise Unusable("it has no tests")
        name, starter = tests.get("fn_name"), record.get("starter_code")
        solutions = _decoded(record.get("solutions"))
        solution = _block(str(solutions[0])) if isinstance(solutions, list) and solutions else ""
        prompt = _question_with_code(question, starter, f"Write a Python function `{name}`." if name else READS)
        from_columns = not isinstance(record.get("input_output"), str)
        return _row(prompt, source, tests, split, index, from_columns=from_columns, solution=solution)

    return convert


apps, taco = _contest("codeparrot/apps"), _contest("BAAI/TACO")


def livecodebench(record: JsonObject, split: str, index: int) -> JsonObject:
    """Convert a problem of LiveCodeBench, which has no solutions; its private tests stay compressed."""
    tests = {key: record.get(key) for key in ("public_test_cases", "private_test_cases", "metadata")}
    prompt = _question_with_code(text_in(record, "question_content"), record.get("starter_code"), READS)
    return _row(prompt, "livecodebench/code_generation_lite", tests, split, index)


def _question_with_code(question: str, starter: object, otherwise: str) -> str:
    if isinstance(starter, str) and starter.strip():
        return f"{question}\n\nComplete this code. {BLOCK}\n\n{_block(starter)}"
    return f"{question}\n\n{otherwise} {BLOCK}"


def _block(code: str) -> str:
    return f"```python\n{code.rstrip()}\n```"


def _decoded(value: object) -> object:
    """Parse a JSON column; return None if it is empty or not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _row(
    prompt: str, source: str, tests: JsonObject, split: str, index: int, *, from_columns: bool = False, **extra: str
) -> JsonObject:
    try:
        check_truth(source, tests, {}, from_columns=from_columns)
    except ValueError as error:
        raise Unusable(str(error)) from error
    return rule_row(prompt, source, json.dumps(tests), split, index, "code", **extra)
