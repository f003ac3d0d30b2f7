"""The layouts that tests come in, and what does not parse."""

import base64
import contextlib
import datetime
import json
import pickle
import time
import zlib
from decimal import Decimal

import pytest

from tether.text.rewards.sandbox import cases
from tether.text.rewards.sandbox.cases import AssertTest, CallTest, StdioTest, parse_tests, refuse_converted

STDIN = {"input": "1 2\n", "output": "3\n", "testtype": "stdin"}
FUNCTIONAL = {"input": "[1, 2]\n7", "output": "9", "testtype": "functional"}


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def refuse_columns(tests):
    refuse_converted(tests, parse_tests(tests))


def test_apps_taco_and_verl_rows():
    pairs = {"inputs": ["1 2\n", ["3 4", "5"]], "outputs": ["3\n", ["7", "5"]]}
    expected = [StdioTest("1 2\n", "3\n"), StdioTest("3 4\n5", "7\n5")]
    for form in (pairs, json.dumps(pairs), {"input_output": json.dumps(pairs)}):
        assert parse_tests(form) == expected


def test_calls():
    tests_of_row = parse_tests({"fn_name": "add", "inputs": [[1, {"2": 3}], "[1, 2]\n7"], "outputs": [[3], "9"]})
    assert tests_of_row == [CallTest("add", [1, {2: 3}], [3]), CallTest("add", [[1, 2], 7], 9)]


def test_texts_that_are_returned_stay_texts():
    """Beside arguments that are values, as in APPS; beside arguments in JSON the result is JSON, too."""
    assert parse_tests({"fn_name": "f", "inputs": [["a"]], "outputs": ["5"]}) == [CallTest("f", ["a"], "5")]
    assert parse_tests({"fn_name": "f", "inputs": ['"a"'], "outputs": ["5"]}) == [CallTest("f", ["a"], 5)]


def test_keys_that_other_layouts_have_are_null_in_a_column():
    pairs = {"inputs": ["1 2\n"], "outputs": ["3\n"], "fn_name": None, "input_output": None, "public_test_cases": None}
    assert parse_tests(pairs) == [StdioTest("1 2\n", "3\n")]
    listed = {"public_test_cases": [STDIN | {"testtype": None, "metadata": None}], "inputs": None, "outputs": None}
    assert parse_tests(listed) == [StdioTest("1 2\n", "3\n")]


def test_mappings_with_null_are_refused_where_a_column_may_have_filled_them():
    refuse_columns({"fn_name": "f", "inputs": [[None, [None]]], "outputs": [None]})
    for value in ({"a": None}, [[{"": None}]], {"a": {"b": [1, {"c": None}]}}):
        for argument, expected, what in ((value, 1, "input 1"), (1, value, "output 1")):
            tests = {"fn_name": "f", "inputs": [[1], [argument]], "outputs": [{"a": 1}, expected]}
            refuse_columns(json.dumps(tests))
            with pytest.raises(ValueError, match=rf"^{what} has a mapping with null for '.?'.*a JSON text"):
                refuse_columns(tests)


DECIMAL = [
    {"fn_name": "f", "inputs": [[1.5], [2.0]], "outputs": [1, 2]},
    {"fn_name": "f", "inputs": [[{"a": [1.5, 2.0]}]], "outputs": [1]},
    {"fn_name": "f", "inputs": [[1]], "outputs": [2.0]},
    {"inputs": [2.0], "outputs": ["1"]},
    {"input_output": {"inputs": ["1"], "outputs": [[1.5, 2.0]]}},
]


def test_whole_numbers_that_a_column_may_have_made_decimal_are_refused():
    """A function of a whole number fails at 2.0, and 10000000007.0 is near 10000000008."""
    for tests in DECIMAL:
        refuse_columns(json.dumps(tests))
        with pytest.raises(ValueError, match=r"the tests have 2\.0 as a decimal number.*a JSON text"):
            refuse_columns(tests)
        refuse_columns(json.loads(json.dumps(tests).replace("2.0", "2.5")) | {"time_limit": 2.0})


NOT_JSON = [
    (datetime.date(2020, 2, 29), r"datetime\.date\(2020, 2, 29\) of the type date"),
    ([[datetime.datetime(2020, 2, 29)]], ".* of the type datetime"),
    ({"a": Decimal("0.1")}, r"Decimal\('0.1'\) of the type Decimal"),
    ([b"text"], "b'text' of the type bytes"),
    ((1, 2), r"\(1, 2\) of the type tuple"),
    ({1: 2}, "1 of the type int as a key"),
]


def test_values_that_json_does_not_have_are_refused():
    """A column may hold them: they would reach the answer as something else, and no result is equal to them."""
    for value, problem in NOT_JSON:
        for argument, expected, what in ((value, 1, "input 0"), (1, value, "output 0")):
            with pytest.raises(ValueError, match=f"^{what} has {problem}"):
                parse_tests({"fn_name": "f", "inputs": [[argument]], "outputs": [expected]})


def test_a_function_may_be_named_as_a_builtin():
    (test,) = parse_tests({"test_list": ["assert sum(10, 15) == 6"]})
    assert test.functions == {"sum": "sum"}


def test_an_assertion_that_asserts_nothing_is_refused():
    for line in ("", "# nothing", "pass", "None", "'doc'", None, 3):
        with pytest.raises(ValueError, match=r"assertion 1 (of the row asserts nothing|is .*, not a text)"):
            parse_tests({"test_list": ["assert f(1)", line]})
        if isinstance(line, str):
            row = {"prompt": "", "test": f"def check(candidate):\n    pass\n    {line}", "entry_point": "f"}
            with pytest.raises(ValueError, match="test of the row asserts nothing"):
                parse_tests(row)


MALFORMED = [
    {"public_test_cases": [STDIN], "metadata": "[1]"},
    {"public_test_cases": [STDIN | {"metadata": "{}"}]},
    {"public_test_cases": [STDIN], "private_test_cases": base64.b64encode(zlib.compress(b"K\x01K\x01a.")).decode()},
    {"fn_name": "f", "inputs": [[{"--1": 2}]], "outputs": [1]},
]


def test_rows_that_are_malformed_within_are_read_or_refused():
    """Whatever else is raised would be an error of each response."""
    for row in MALFORMED:
        with contextlib.suppress(ValueError):
            parse_tests(row)


def test_livecodebench_rows():
    row = {
        "public_test_cases": json.dumps([STDIN]),
        "private_test_cases": packed(json.dumps([FUNCTIONAL])),
        "metadata": json.dumps({"func_name": "solve"}),
    }
    assert parse_tests(row) == [StdioTest("1 2\n", "3\n"), CallTest("solve", [[1, 2], 7], 9)]
    listed = [FUNCTIONAL | {"metadata": {"func_name": "solve"}}]
    assert parse_tests(json.dumps(listed)) == [CallTest("solve", [[1, 2], 7], 9)]


def test_humaneval_rows():
    row = {
        "prompt": "def f(x):\n    'doc'\n",
        "test": "def check(candidate):\n    assert candidate(1)",
        "entry_point": "f",
    }
    (test,) = parse_tests(row)
    assert isinstance(test, AssertTest)
    assert test.functions == {"candidate": "f"}
    assert test.prompt == row["prompt"]
    assert test.tests.endswith("check(candidate)\n")


def test_assertions_name_the_functions_that_they_call():
    setup = "import math\ndef near(a, b):\n    return math.isclose(a, b)"
    row = {"test_list": ["assert near(area(2), max(scale(1), 4))"], "test_setup_code": setup}
    (test,) = parse_tests(row)
    assert test.functions == {"area": "area", "scale": "scale"}
    assert len(parse_tests({"assert_case": ["assert f(1) == 2", "assert f(2) == 3"]})) == 2


def test_assertions_have_the_imports_and_the_setup_of_their_row():
    row = {"test_list": ["assert f(1) == datetime.date(1, 1, 1) == D"],
           "test_imports": ["import datetime", "import os"], "test_setup_code": ["D = datetime.date.min"]}  # fmt: skip
    (test,) = parse_tests(row)
    assert test.functions == {"f": "f"}
    assert test.tests.startswith("import datetime\nimport os\nD = datetime.date.min\n")
    with pytest.raises(ValueError, match="test_imports of the row is "):
        parse_tests(row | {"test_imports": [1]})


def test_an_assertion_that_uses_nothing_of_the_answer_is_refused():
    for line in ("assert 1", "assert math.pi > 3", "assert sum([1]) == 1 if len([]) else True"):
        with pytest.raises(ValueError, match="assertion 0 uses no function of the answer"):
            parse_tests({"test_list": [line], "test_setup_code": "sum = len = print"})


def test_assertions_name_the_functions_that_they_pass_on():
    line = "try:\n    assert list(map(f, sorted([1], key=lambda x: -x))) == [math.pi]\nexcept ValueError as e:\n    e"
    (test,) = parse_tests({"test_list": [line]})
    assert test.functions == {"f": "f"}


def of_bytes(content):
    return {"public_test_cases": [], "private_test_cases": base64.b64encode(zlib.compress(content)).decode()}


TEXT = b"\x80\x04X\x01\x00\x00\x00a"


PICKLES = [
    b"", TEXT, TEXT + b"r" + b"\xff" * 4 + b".", TEXT + b"r\0\0\0\x04.", TEXT + b"}b.", TEXT + b")R.", TEXT + b")\x81.",
    TEXT + b"Q.", TEXT + TEXT[2:] + b".", TEXT + b"\x94" * 99 + b".", b"\x80\x05\x97.", b"cos\nsystem\n.", b"Pa\n.",
    *(bytes([128, 5, code]) + length for code in b"\x8d\x8e\x96" for length in (b"\xff" * 8, b"\0" * 7 + b"\1")),
    b"I" + b"9" * 10**6 + b"\n.", b"p" + b"9" * 10**6 + b"\n.", b"V\\ud80\n.",
]  # fmt: skip


def test_a_pickle_of_anything_but_a_text_is_refused_unread():
    for content in PICKLES:
        begun = time.process_time()
        with pytest.raises(
            ValueError, match=r"private_test_cases is (neither|not valid) JSON|more than 100,000 digits"
        ):
            parse_tests(of_bytes(content))
        assert time.process_time() - begun < 0.5, content[:20]


def test_packed_tests_have_a_largest_size(monkeypatch):
    monkeypatch.setattr(cases, "_MAX_UNPACKED", 1 << 20)
    with pytest.raises(ValueError, match="private_test_cases is packed and unpacks to more than 1 MiB"):
        parse_tests(of_bytes(bytes(1 << 21)))
    with pytest.raises(ValueError, match="neither JSON nor"):
        parse_tests({"public_test_cases": base64.b64encode(zlib.compress(pickle.dumps("[]" * 999))[:-9]).decode()})
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        text = json.dumps([STDIN | {"input": "é" * 1000}])
        assert parse_tests(of_bytes(pickle.dumps(text, protocol)))


WITH_NUMBERS = [
    '{"inputs": [[1]], "outputs": [%s], "fn_name": "f"}', {"inputs": ["1"], "outputs": ["-%s"], "fn_name": "f"},
    {"inputs": ["%s"], "outputs": ["1"], "fn_name": "f"}, {"assert_case": ["assert f(1) == %s"]},
    '{"inputs": [%s], "outputs": ["1"]}', {"prompt": "", "entry_point": "f", "test": "assert check(%s)"},
]  # fmt: skip


def test_whole_numbers_have_a_largest_length():
    """Python reads a million digits in half a minute, and that for each response."""
    for row in WITH_NUMBERS:
        text = row if isinstance(row, str) else json.dumps(row)
        parse_tests(text % ("9" * 100_000))
        with pytest.raises(ValueError, match="an integer of more than 100,000 digits"):
            parse_tests(text % ("9" * 100_001))


def test_keys_longer_than_numbers_stay_texts():
    """Among them are those whose hashes collide, of which a dictionary is slow."""
    keys = {str(n * (2**61 - 1)): 1 for n in range(1, 20001)}
    begun = time.process_time()
    assert parse_tests({"inputs": [[keys]], "outputs": [1], "fn_name": "f"}) == [CallTest("f", [keys], 1)]
    assert time.process_time() - begun < 0.5


@pytest.mark.parametrize("layers", [100, 5000])
def test_tests_within_tests_are_refused(layers):
    row = {}
    for _ in range(layers):
        row = {"input_output": row}
    with pytest.raises(ValueError, match="the tests"):
        parse_tests(row)


def nested(depth, inner):
    return json.loads("[" * depth + inner + "]" * depth)


def test_values_are_nested_as_deep_as_they_can_travel():
    """An answer would get something else in place of what is deeper, or nothing that it returns would be right."""
    parse_tests({"fn_name": "f", "inputs": [nested(101, "1")], "outputs": [nested(101, "1")]})
    for inputs, outputs, what in (
        (nested(101, "{}"), 1, "input 0"), (json.dumps(nested(101, "1")), "1", "input 0"),
        ([1], nested(102, ""), "output 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{what} is nested more than 100 levels deep"):
            parse_tests({"fn_name": "f", "inputs": [inputs], "outputs": [outputs]})


class Evil:
    def __reduce__(self):
        return (print, ("called",))


UNREADABLE = [
    ("not json", "ground_truth is not valid JSON"),
    (None, "no known layout: NoneType"),
    ({"a": 1}, r"no known layout: \['a'\]"),
    ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
    ({"inputs": [], "outputs": []}, "has no test"),
    ({"inputs": ["1", "2"], "outputs": [3, None]}, "output 1 is 'None', not a text or its lines"),
    ({"inputs": ["1", ["2", {"a": 1}]], "outputs": ["3", "4"]}, "input 1 is .*, not a text or its lines"),
    ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "input 0 is '1', not a list of arguments"),
    ({"inputs": ["1 2"], "outputs": ["3"], "fn_name": "f"}, "input 0 is not valid JSON"),
    ({"inputs": [[1]], "outputs": [1], "fn_name": 3}, "fn_name is 3"),
    ({"inputs": ["\ud800"], "outputs": ["1"]}, "input 0 has an unpaired surrogate"),
    ([FUNCTIONAL], r'test 0 is functional, but its function is missing: add "metadata": {"func_name": NAME}'),
    ({"public_test_cases": [FUNCTIONAL]}, r'a column `metadata` with {"func_name": NAME} to the row'),
    ([{"input": 3}], "test 0 is"),
    ({"prompt": "", "entry_point": "f", "test": "def check("}, "test of the row is not valid Python"),
    ({"assert_case": ["assert ("]}, "assertion 0 of the row is not valid Python"),
    ({"public_test_cases": "!!"}, "neither JSON nor LiveCodeBench's packed form"),
    (
        {"public_test_cases": packed(Evil())},
        "packed form: it is not a pickle of a text",
    ),
    ({"public_test_cases": "[]"}, "has no test"),
]


def test_what_does_not_parse_is_named(capsys):
    for row, message in UNREADABLE:
        with pytest.raises(ValueError, match=message):
            parse_tests(row)
    assert capsys.readouterr().out == ""
