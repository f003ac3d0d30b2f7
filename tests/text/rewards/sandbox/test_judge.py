"""Which block of a response is the program, and which output is right."""

import itertools
import json
import time

import pytest

from tether.text.rewards.sandbox.cases import AssertTest, CallTest, StdioTest
from tether.text.rewards.sandbox.harness import decode, encode
from tether.text.rewards.sandbox.judge import Answer, find_answer, job_for, same_output
from tether.text.rewards.sandbox.limits import Finished

DOCUMENTED = 'def f():\n    """Call it.\n\n    ```python\n    f()\n    ```\n    """\n'


RESPONSES = [
    ("so:\n```python\na\n```\nor\n```python\nb\n```", ("python",), ("python", "b\n")),
    ("```py\na\n```\n```\nb\n```", ("python",), ("python", "a\n")),
    ("```\na\n```", ("cpp", "python"), ("cpp", "a\n")),
    ("``` Python title=a.py \na\n```\n``` \nb\n```", ("python",), ("python", "a\n")),
    ("```c++\na\n```", ("python", "cpp"), ("cpp", "a\n")),
    ("```rust\na\n```", ("python",), None),
    ("```python\nwas cut of", ("python",), ("python", "was cut of")),
    ("no block", ("python",), None),
    ("", ("python",), None),
    ("# a comment", ("python",), None),
    ("print(1)", ("python", "cpp"), ("python", "print(1)")),
    ("print(1)", ("cpp", "python"), None),
    # Words that quote how an answer has to begin and end.
    ("It begins with ```python and ends with ```.\n```python\na\n```", ("python",), ("python", "a\n")),
    ("It begins with ```python\nand ends with ```.\n```python\na\n```", ("python",), ("python", "a\n")),
    ("Marks (```) first:\n```\na\n```", ("python",), ("python", "a\n")),
    ("``` is a mark.\n```python\na\n```", ("python",), ("python", "a\n")),
    # What is thought is no answer.
    ("<think>\n```python\na\n```\n</think>\n```\nb\n```", ("python",), ("python", "b\n")),
    ("```python\na\n```\n</think>\nIt cannot be done.", ("python",), None),
    ("so\n</think>\nprint(1)", ("python",), ("python", "\nprint(1)")),
    # Marks within the code.
    ("```python\ns = '```'\n# ```\na\n```", ("python",), ("python", "s = '```'\n# ```\na\n")),
    (f"```python\n{DOCUMENTED}```", ("python",), ("python", DOCUMENTED)),
    ("````python\n```\na\n````", ("python",), ("python", "```\na\n")),
    # Other places of the marks.
    ("1. ```python\n   if a:\n       b\n   ```", ("python",), ("python", "if a:\n    b\n")),
    ("- so:\n\t```python\n\tif a:\n\t\tb\n\t```", ("python",), ("python", "if a:\n\tb\n")),
    ("~~~python\na\n~~~", ("python",), ("python", "a\n")),
    ("So: ```python\na\n```", ("python",), ("python", "a\n")),
    ("```python\na```\nSo:\n```\n3\n```", ("python",), ("python", "a")),
    ("```python\na\n```<|im_end|>", ("python",), ("python", "a\n")),
    ("```python\na\n``` It prints:\n```text\n3\n```", ("python",), ("python", "a\n")),
    ("```python\r\na\r\n```\r\n", ("python",), ("python", "a\r\n")),
    *(
        (f"```{tag}\na\n```", ("python",), ("python", "a\n"))
        for tag in ("python3.11", "pypy3", "Python:main.py", "{python}", "{.python .numberLines}", "python{1,3}")
    ),
    ("```c++17\na\n```", ("cpp",), ("cpp", "a\n")),
]


def test_the_program_of_a_response():
    answers = [find_answer(response, languages) for response, languages, _ in RESPONSES]
    assert answers == [expected and Answer(*expected) for _, _, expected in RESPONSES]


def test_a_response_without_end_is_read_soon():
    for repeated in ("`", "```a ", " ", "~", "```\n", "> ", "a"):
        begun = time.process_time()
        find_answer(repeated * 200_000, ("python",))
        assert time.process_time() - begun < 5, repeated


def test_a_completion_needs_no_block():
    assert find_answer("    return 1", ("python",), raw=True) == Answer("python", "    return 1")


OUTPUTS = [
    ("3\n", "3", True),
    ("1  2 \n3\n\n", "1 2\n3", True),
    ("1 2 3", "1 2\n3", False),
    ("\n1\n\n2", "1\n2\n", True),
    ("1\n2", "\n1\n \n2\n", True),
    ("0.3333333", "0.33333334", True),
    ("0.3333", "0.33333334", False),
    ("2.0", "2", True),
    ("1000000000.0", "1000000007", False),
    ("12e5", "1200000", True),
    ("2000000.0000001", "2000000.0", True),
    ("10000001", "10000000", False),  # whole numbers, within 1e-6
    ("yes", "Yes", False),
    ("", "3", False),
    ("nan", "nan", True),
]


def test_outputs():
    assert [case for case in OUTPUTS if same_output(case[0], case[1]) is not case[2]] == []


RESULTS = [
    (3, 3, True),
    (3, [3], True),
    ((1, 2), [1, 2], True),
    ([1, (2, "a")], [[1, [2, "a"]]], True),
    ({1: 2}, {"1": 2}, True),
    (0.1 + 0.2, 0.3, True),
    ({"sum": 0.1 + 0.2, "parts": [{"x": (1.0,)}]}, {"sum": 0.3, "parts": [{"x": [1]}]}, True),
    ({"sum": 0.4}, {"sum": 0.3}, False),
    ({"sum": 0.3}, {"sum": 0.3, "more": 1}, False),
    ({True: 1, None: 2, 1.5: 3}, {"true": 1, "null": 2, "1.5": 3}, True),
    (10**20 + 1, 10**20, False),
    (1000000000.0, 1000000007, False),
    (7.0, 7, True),
    (10**400, 1.5, False),
    (1.5, 10**400, False),
    ("3", 3, False),
    (None, None, True),
    (object(), [], False),
]


def test_results():
    for result, expected, passes in RESULTS:
        job = job_for(CallTest("f", [], expected), Answer("python", ""))
        printed = json.dumps(encode(result)).encode()
        assert job.passed(Finished("exit", 0, printed, b"", 0.0)) is passes, (result, expected)
        assert not job.passed(Finished("exit", 0, b"no json", b"", 0.0))


COLLIDING = [n * (2**61 - 1) for n in range(1, 20001)]  # hashes of whole numbers are remainders by that


EXPECTED = [1, [1], {"1": 2}, [[n] for n in range(30000)], dict.fromkeys(map(str, COLLIDING))]
PRINTED = [
    f'{{"complex": [1{"0" * 400}]}}', '{"complex": [null]}', '{"complex": {"a": 1}}', '{"bytes": "0"}', '{"int": "1"',
    '{"int": "0x"}', '{"remote": 0}', '{"value": ["fractions.Fraction", {"tuple": ["1/1"]}]}', '{"set": [[1]]}', "{}",
    '{"dict": [[{"dict": []}, 1]]}', '{"dict": [[[], 1]]}', '{"dict": 1}', '{"tuple": null}', '"\\ud800"', "1 1",
    f'{{"int": "0x{"f" * 200000}"}}', f'{{"dict": [[{{"int": "0x{"f" * 200000}"}}, 1]]}}', "9" * 5000,
    "[" * 100000 + "]" * 100000, '{"tuple":[' * 400 + "]}" * 400, f"[{'[],' * 2600000}[]]",
    json.dumps({"set": COLLIDING}), json.dumps({"dict": [[n, None] for n in COLLIDING[1:]]}),
]  # fmt: skip


@pytest.mark.parametrize("offset", [0, *(pytest.param(later, marks=pytest.mark.slow) for later in (1, 2))])
def test_whatever_an_answer_prints_is_wrong_at_worst_and_soon(offset):
    for expected, printed in itertools.product(EXPECTED, PRINTED[offset::3]):
        job, begun = job_for(CallTest("f", [], expected), Answer("python", "")), time.process_time()
        assert not job.passed(Finished("exit", 0, printed.encode(), b"", 0.0)), printed[:40]
        assert time.process_time() - begun < 1, printed[:40]


def test_results_take_more_room_than_what_is_expected():
    for result, expected in (
        ((0.1 + 0.2,) * 9999, [0.3] * 9999), ([{1: ()}] * 999, [{"1": []}] * 999), ([10**308] * 999, [1e308] * 999),
        ({(1, 2): 10**2000}, {"(1, 2)": 10**2000}), ({1: {2: 3}}, {"1": {"2": 3}}), (3 + 0j, 3),
    ):  # fmt: skip
        job = job_for(CallTest("f", [], expected), Answer("python", ""))
        assert job.passed(Finished("exit", 0, json.dumps(encode(result)).encode(), b"", 0.0))


def test_tests_that_ran_through_are_proven():
    """By a word that only the process of the tests knows: any process may end the sandbox with 0."""
    test = AssertTest("assert f(1)", {"f": "f"})
    job, other = (job_for(test, Answer("python", "")) for _ in range(2))
    proof = json.loads(job.stdin)["proof"].encode()
    assert job.passed(Finished("exit", 0, b"printed by tests\n" + proof, b"", 0.0))
    assert not other.passed(Finished("exit", 0, b"\n" + proof, b"", 0.0))
    assert not job.passed(Finished("exit", 0, b"", b"", 0.0))


def test_plain_data_survives_the_way_through_json():
    value = [1, 2.5, float("inf"), "a", None, True, (1, (2,)), {1, 2}, {"a": [1], (1, 2): {3: 4}}]
    assert decode(json.loads(json.dumps(encode(value)))) == value
    assert encode(type("Always", (), {"__eq__": lambda *_: True})()) == {"other": "Always"}


def test_the_answer_never_meets_what_is_expected():
    for test in (StdioTest("1", "SECRET"), CallTest("f", [1], "SECRET")):
        job = job_for(test, Answer("python", "code"))
        assert b"SECRET" not in job.stdin
        assert "SECRET" not in job.source
