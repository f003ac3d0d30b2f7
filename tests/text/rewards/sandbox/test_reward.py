"""Programs scored on this machine, in every language that is installed, from the call to the pool."""

import json
import platform
import shutil
import sys
import threading
import time

import psutil
import pytest
from typer.testing import CliRunner

from tests.processes import command_of, runs
from tests.runs.tiny_run import base_overrides, write_inputs, write_jsonl
from tests.text.rewards.sandbox.machine import confined, needs_prlimit
from tether.commands.cli import app
from tether.config import load_config
from tether.text.input_checks import missing_inputs
from tether.text.rewards.outcome import RewardError, RewardRequest, Score
from tether.text.rewards.router import check_sources
from tether.text.rewards.sandbox import bubblewrap, run
from tether.text.rewards.sandbox.languages import LANGUAGES
from tether.text.rewards.sandbox.limits import Limits, Program, SandboxError
from tether.text.rewards.sandbox.options import ProgramOptions
from tether.text.rewards.sandbox.reward import ProgramReward
from tether.text.rewards.service.pool import RewardPool

LIMITS = Limits(seconds=10, memory_mb=1024, processes=64)
SHORT = Limits(seconds=1, memory_mb=256, processes=32)
SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
HUMANEVAL = {
    "prompt": 'from typing import List\n\ndef total(xs: List[int]) -> int:\n    """Their sum."""\n',
    "entry_point": "total",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}
IN_LANGUAGES = {
    "python": "a, b = map(int, input().split())\nprint(a + b)",
    "c": '#include <stdio.h>\nint main() { int a, b; scanf("%d %d", &a, &b); printf("%d", a + b); }',
    "cpp": "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }",
    "javascript": "console.log(require('fs').readFileSync(0, 'utf8').split(' ').map(Number).reduce((a, b) => a + b))",
    "java": "import java.util.*; public class Main { public static void main(String[] x) "
    "{ Scanner s = new Scanner(System.in); System.out.println(s.nextInt() + s.nextInt()); } }",
    "bash": "read a b\necho $((a + b))",
    "perl": "my ($a, $b) = split ' ', <STDIN>;\nprint $a + $b",
}
both = pytest.mark.parametrize(
    "unconfined",
    [pytest.param(False, marks=confined), pytest.param(True, marks=(needs_prlimit, pytest.mark.slow))],
    ids=["confined", "plain"],
)


def score(code, tests, *, tag="python", **options):
    reward = ProgramReward(ProgramOptions(**{"limits": LIMITS} | options))
    return reward("apps", f"```{tag}\n{code}\n```", tests, {})


@both
@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_reads_and_prints(language, unconfined):
    if missing := [name for name in LANGUAGES[language].needs if not shutil.which(name, path=bubblewrap.PATH)]:
        pytest.skip(f"not installed: {missing}")
    options = {"languages": (language,), "unconfined": unconfined}
    assert score(IN_LANGUAGES[language], SUMS, tag=language, **options)["score"] == 1
    assert score("(", SUMS, tag=language, **options)["score"] == 0


def test_an_answer_without_a_program_says_why():
    """No sandbox is needed for that."""
    for tag, tests, languages, expected_reason in (
        ("c++", SUMS, ("python",), "the code block is in cpp, but reward_model.sandbox.languages has python"),
        ("rust", SUMS, ("python", "c"),
         "the code block is in rust, but reward_model.sandbox.languages has python, c"),
        ("cpp", HUMANEVAL, ("python", "cpp"), "the code block is in cpp, but only functions in Python can be called"),
        (None, SUMS, ("python",), "the response has no code block"),
    ):  # fmt: skip
        reward = ProgramReward(ProgramOptions(languages=languages))
        response = f"Thus:\n```{tag}\nint main() {{}}\n```" if tag else "The sum of both."
        assert reward("apps", response, tests, {}) == {
            "score": 0.0,
            "acc": False,
            "timed_out": False,
            "reason": expected_reason,
        }


@needs_prlimit
@pytest.mark.parametrize(("language", "code", "expected_reason"), [
    ("java", "class A { }\npublic class Sum { }", "Main.java:2: error: class Sum is public, should be declared"),
    ("cpp", "int f() {}\nint main() { return x; }", "answer.cpp:2:21: error: 'x' was not declared"),
    ("python", "print(3)\nprint(missing)", "the program ended with exit code 1: NameError: name 'missing' is not"),
    ("bash", "exit 3", "the program ended with exit code 3"),
])  # fmt: skip
def test_a_program_that_fails_says_how(language, code, expected_reason):
    if missing := [name for name in LANGUAGES[language].needs if not shutil.which(name, path=bubblewrap.PATH)]:
        pytest.skip(f"not installed: {missing}")
    got = score(code, SUMS, tag=language, languages=(language,), unconfined=True)
    assert expected_reason in got["reason"].replace("\u2018", "'").replace("\u2019", "'")


CALLED = [
    ("def f(x):\n    print(1)\n    return [x, x]",
     {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1, 1], [0]]}, 0.5),
    ("class Solution:\n    def f(self, x: List[int]):\n        return deque(x)[0]",
     {"fn_name": "f", "inputs": [[[7]]], "outputs": [[7]]}, 1),
    ("    return sum(xs)", HUMANEVAL, 1),
    ("def total(xs):\n    return sum(xs)", HUMANEVAL, 1),
    ("from __future__ import annotations\ndef total(xs: Unknown):\n    return sum(xs)", HUMANEVAL, 1),
    ("import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\n"
     "def total(xs):\n    return sum(P(x).x for x in xs)", HUMANEVAL, 1),
    ("def total(xs):\n    return 3", HUMANEVAL, 0),
    ("from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\n"
     "def f(x):\n    return P(x).x", {"fn_name": "f", "inputs": [[1]], "outputs": [1]}, 1),
    ("import pickle\nclass P:\n    x: int\n"
     "def f(x):\n    pickle.dumps(P())\n    return P.__annotations__['x'] is int",
     {"fn_name": "f", "inputs": [[1]], "outputs": [True]}, 1),
    ("def f(x):\n    if x < 0:\n        raise ValueError\n    return {x}", {"assert_case": [
        "assert f(1) == {1}", "assert f(x=2) == {2}",
        "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError"]}, 1),
]  # fmt: skip


@both
def test_functions_are_called(unconfined):
    got = [score(code, tests, unconfined=unconfined)["score"] for code, tests, _ in CALLED]
    assert got == [expected for _, _, expected in CALLED]


OBJECTS = """
class Count:
    def __init__(self, n=0):
        self.n = n
    def add(self, by=1):
        self.n += by
        return self
    def __len__(self):
        return self.n
    def __getitem__(self, at):
        return at + self.n
    def __eq__(self, other):
        return True

def total(counts):
    return sum(count.n for count in counts)

def order(xs, seen):
    xs.sort()
    seen.update(xs)

def squares():
    yield from (n * n for n in itertools.count())

def adder(a):
    return lambda b: a + b

def raw(x):
    return bytes([x]), complex(x, 1), bytearray(b"a")

def frozen():
    return {frozenset({1}): {frozenset()}}

span = range
"""


USES = """
assert list(map(total, [[Count(3)]])) == [3]
assert len(Count().add().add(by=3)) == 4 and Count(2).n == 2 and Count(1)[3] == 4 and not Count()
one = Count(1)
one.n = 5
assert total([one, Count(2)]) == 7 and str(one).startswith('<')
try:
    Count().missing
except AttributeError:
    pass
else:
    raise AssertionError
xs, seen = [3, 1], set()
order(xs, seen)
assert xs == [1, 3] and seen == {1, 3}
assert list(itertools.islice(squares(), 3)) == [0, 1, 4] and adder(2)(3) == 5
assert raw(7) == (b'\\x07', 7 + 1j, b'a')
assert frozen() == {frozenset({1}): {frozenset()}} and all(isinstance(key, frozenset) for key in frozen())
assert span(3) == range(3)
"""


@both
def test_assertions_use_objects_of_the_answer(unconfined):
    got = score(OBJECTS, {"assert_case": [USES]}, unconfined=unconfined)
    assert got["score"] == 1, got["reason"]


VALUES = """
import datetime, decimal, fractions

def half(x=1):
    return [fractions.Fraction(x) / 2]

def price():
    return decimal.Decimal("0.10")

def day():
    return datetime.datetime(2020, 2, 29, tzinfo=datetime.timezone.utc), datetime.date(1, 1, 1), datetime.timedelta(1)

class Fraction:
    def __eq__(self, other):
        return True
Fraction.__module__ = "fractions"

def faked():
    return Fraction()
"""


@both
def test_values_of_the_standard_library_are_compared(unconfined):
    setup = "from fractions import Fraction\nfrom decimal import Decimal\nfrom datetime import *"
    lines = [
        "assert half() == [Fraction(1, 2)] and half(Fraction(1, 3)) == [Fraction(1, 6)]",
        "assert not half() == [Fraction(1, 3)]",
        "assert price() == Decimal('0.1') and isinstance(price(), Decimal)",
        "assert day() == (datetime(2020, 2, 29, tzinfo=timezone.utc), date(1, 1, 1), timedelta(days=1))",
    ]
    got = score(VALUES, {"test_setup_code": setup, "test_list": ["\n".join(lines)]}, unconfined=unconfined)
    assert got["score"] == 1, got["reason"]
    faked = {"test_setup_code": setup, "test_list": ["assert faked() == Fraction(1, 2)"]}
    assert score(VALUES, faked, unconfined=unconfined)["score"] == 0


SEVEN, EIGHT = (f"1{'0' * 5999}{digit}" for digit in (7, 8))  # Python makes text of 4300 digits by default


@both
def test_whole_numbers_of_thousands_of_digits(unconfined):
    before = sys.get_int_max_str_digits()
    for code, tests in (
        ("print(10**6000 + int(input()))", {"inputs": ["7"], "outputs": [SEVEN]}),
        ("def f(x):\n    return [x + 1, -x]", {"fn_name": "f", "inputs": [SEVEN], "outputs": [f"[{EIGHT}, -{SEVEN}]"]}),
        ("def f(x):\n    return x + 1", {"test_list": [f"assert f({SEVEN}) == {EIGHT}"]}),
        ("def f(x):\n    return len(str(x))", {"test_list": ["assert f(10 ** 6000) == 6001"]}),
    ):
        wrong = code.replace("return ", "return 9, ").replace("6000", "6001")
        got = [score(one, json.dumps(tests), unconfined=unconfined)["score"] for one in (code, wrong)]
        assert got == [1, 0], code
    assert sys.get_int_max_str_digits() == before


EXPECTS = "try:\n    f(-1)\n    assert False\nexcept {} as e:\n    assert {} in str(e)"


ENDS = [
    "def f(x) return 1", "raise SystemExit", "import os\ndef f(x): os._exit(1)", "import sys\ndef f(x): sys.exit()",
    "import ctypes\ndef f(x): ctypes.string_at(0)", "g = 1",
    *(f"import os\ndef f(x):\n    for n in range(3, 9): os.write(n, b'{line}\\n')"
      for line in ("x", "1", "[]", "[1, 2]", '{}', '{"raised": ["exec", ["0"]]}', '{"raised": ["ValueError"]}')),
]  # fmt: skip


@both
def test_the_end_of_an_answer_is_no_exception_of_it(unconfined):
    """Reading from its process then fails with a ValueError or an OSError, which no test may take for the answer's."""
    lines = [EXPECTS.format("Exception", "''"), f"{EXPECTS.format('Exception', repr(''))}\nassert f(1)"]
    assert [code for code in ENDS if score(code, {"test_list": lines}, unconfined=unconfined)["score"] != 0] == []


RAISED = [
    ("raise ValueError('negative')", "ValueError", "negative"),
    ("raise type('Own', (ValueError,), {})('negative', x)", "ValueError", "('negative', -1)"),
    ("raise type('Own', (KeyError,), {'__str__': lambda self: 'mine'})", "KeyError", "mine"),
    ("import json; json.loads('')", "ValueError", "Expecting value"),
    ("b'\\xff'.decode()", "UnicodeDecodeError", "can't decode byte 0xff"),
    ("open('/no/such/file')", "FileNotFoundError", "[Errno 2] No such file"),
    ("raise KeyError(x)", "KeyError", "-1"),
    ("raise StopIteration", "RuntimeError", ""),
]


@both
def test_exceptions_of_an_answer_arrive_as_their_builtin_class(unconfined):
    answer = "\n".join(f"def f{n}(x): {body}" for n, (body, _, _) in enumerate(RAISED))
    lines = [EXPECTS.format(kind, repr(text)).replace("f(", f"f{n}(") for n, (_, kind, text) in enumerate(RAISED)]
    got = score(answer, {"test_list": ["\n".join(lines)]}, unconfined=unconfined)
    assert got["score"] == 1, got["reason"]


@both
def test_an_answer_that_ends_an_iteration_does_not_pass(unconfined):
    tests = {"test_list": ["assert all(map(f, [1, 2]))"]}
    assert score("def f(x): raise StopIteration", tests, unconfined=unconfined)["score"] == 0
    assert score("def f(x): return x", tests, unconfined=unconfined)["score"] == 1


@both
def test_objects_of_the_answer_are_equal_to_nothing(unconfined):
    lines = ["assert Count() == 3", "assert Count() == Count()", "assert Count() < 3"]
    assert score(OBJECTS, {"assert_case": lines}, unconfined=unconfined)["score"] == 0


PRETENDS = [
    "import os\nos._exit(0)",
    "raise SystemExit",
    "class Equal:\n    def __eq__(self, other):\n        return True\ndef total(xs):\n    return Equal()",
    "class Equal(int):\n    def __eq__(self, other):\n        return True\ndef total(xs):\n    return Equal()",
    "def total(xs):\n    import os, sys\n    os.write(1, b'[3]')\n    os.kill(os.getppid(), 9)",
]


@both
def test_an_answer_that_only_says_that_it_passes_does_not(unconfined):
    """Rewards that run asserts beside the answer in one process give full marks to the first three."""
    assert [code for code in PRETENDS if score(code, HUMANEVAL, unconfined=unconfined)["score"] != 0] == []


ENDS_THE_SANDBOX = """
import os, struct, time
def total(xs):
    # Code for the first process: write 1 to what bwrap waits for, the status of a good end, and exit.
    done = next(int(f) for f in os.listdir('/proc/1/fd') if 'eventfd' in os.readlink('/proc/1/fd/' + f))
    at = int(open('/proc/1/syscall').read().split()[-1], 16)
    code = bytes.fromhex('b801000000bf') + struct.pack('<I', done) + bytes.fromhex('488d3515000000ba080000000f05')
    code += bytes.fromhex('b8e700000031ff0f05') + bytes(5) + struct.pack('<Q', 1)
    with open('/proc/1/mem', 'r+b', buffering=0) as memory:
        memory.seek(at)
        memory.write(code)
    if os.fork() == 0:  # which the first process has to wait for
        if os.fork() == 0:
            time.sleep(0.2)
        os._exit(0)
    os.wait()
    time.sleep(60)
"""


@confined
@pytest.mark.skipif(platform.machine() != "x86_64", reason="it is code of x86-64")
def test_an_answer_that_ends_the_sandbox_does_not_pass():
    assert score(ENDS_THE_SANDBOX, HUMANEVAL)["score"] == 0


@confined
@pytest.mark.parametrize("file", ["mem", "environ", "fd/0"])
def test_an_answer_cannot_look_at_its_tests(file):
    peek = f"def total(xs):\n    import os\n    open(f'/proc/{{os.getppid()}}/{file}', 'rb')\n    return sum(xs)"
    assert score(peek, HUMANEVAL)["score"] == 0
    assert score(peek.replace("getppid", "getpid"), HUMANEVAL)["score"] == 1


@confined
def test_limits_are_a_wrong_answer_and_said():
    loop = {"score": 0.0, "acc": False, "timed_out": True, "reason": "the program exceeded its limit of time"}
    assert score("while True: pass", SUMS, limits=SHORT) == loop
    full = score("x = bytearray(1 << 30)", SUMS, limits=SHORT)
    assert full == loop | {"timed_out": False, "reason": "the program ended with exit code 1: MemoryError"}
    after_one = "n = int(input().split()[0])\nprint(3)\nwhile n > 1: pass"
    assert score(after_one, SUMS, limits=SHORT) == loop | {"score": 0.5}


@confined
def test_only_the_first_tests_count():
    tests = {"inputs": ["", "", ""], "outputs": ["1", "2", "1"]}
    assert score("print(1)", tests)["score"] == pytest.approx(2 / 3)
    assert score("print(1)", tests, max_tests=1)["score"] == 1


# --- what is refused, and what is an error ------------------------------------------------------------------------


@pytest.fixture
def nothing_installed(monkeypatch, tmp_path):
    bubblewrap.confinement_problem.cache_clear()
    monkeypatch.setattr(bubblewrap, "PATH", str(tmp_path))
    monkeypatch.setattr(bubblewrap, "plain_user", dict)
    yield
    bubblewrap.confinement_problem.cache_clear()


@needs_prlimit
def test_a_machine_that_cannot_confine_is_refused_at_the_start(nothing_installed):
    with pytest.raises(ValueError, match=r"reward_model.sandbox: bwrap is not installed .*unconfined=true"):
        check_sources(["openai/gsm8k", "apps"], ProgramOptions())
    check_sources(["openai/gsm8k"], ProgramOptions())


@needs_prlimit
def test_a_kernel_that_does_not_allow_it_is_refused_with_its_words(nothing_installed, tmp_path):
    for name, text in {"bwrap": "echo 'No permissions to create new namespace' >&2; exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("prlimit", "python3"):
        (tmp_path / name).symlink_to("/bin/true")
    with pytest.raises(ValueError, match=r"No permissions to create new namespace\. .*sandbox_fusion\.url"):
        ProgramOptions().check()


@pytest.mark.parametrize(
    ("languages", "message"), [((), "the list is empty"), (("cobol",), "cobol is not one of python")]
)
def test_languages_are_checked(languages, message):
    with pytest.raises(ValueError, match=message):
        ProgramOptions(languages=languages, unconfined=True).check()


@needs_prlimit
def test_plain_runs_need_their_limits_too(monkeypatch, tmp_path):
    monkeypatch.setattr(bubblewrap, "PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"reward_model\.sandbox\.unconfined: prlimit is not installed"):
        ProgramOptions(unconfined=True).check()


def test_a_language_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr("tether.text.rewards.sandbox.languages.PATH", "/nowhere")
    with pytest.raises(ValueError, match=r"sandbox\.languages: perl needs perl in /nowhere"):
        ProgramOptions(languages=("perl",), unconfined=True).check()


def test_what_programs_need_is_found_before_anything_is_loaded(tmp_path, monkeypatch):
    truths = ['{"inputs": ["1"], "outputs": ["1"]}', "no tests", "nor these"]
    file = tmp_path / "rows.jsonl"

    def problems(*arguments):
        rows = [
            {"data_source": "apps", "prompt": "?", "reward_model": {"ground_truth": truth}} for truth in arguments[0]
        ]
        file.write_text("\n".join(map(json.dumps, rows)))
        data = [f"data.train_files={file}", "data.val_files=[]"]
        config = load_config(None, [*data, f"actor_rollout_ref.model.path={tmp_path}", *arguments[1:]]).config
        return [str(problem) for problem in missing_inputs(config, ("data.", "reward_model."))]

    monkeypatch.setattr(bubblewrap, "confinement_advice", lambda: None)
    assert problems(truths[:1]) == []
    (unknown,) = problems(truths[:1], "reward_model.sandbox.languages=[rust]")
    assert unknown.startswith("reward_model.sandbox: languages: rust is not one of python")
    (problems_found,) = problems(truths)
    assert "row 1: ground_truth is not valid JSON" in problems_found
    assert "(1 more of these rows have problems)" in problems_found
    monkeypatch.setattr(bubblewrap, "confinement_advice", lambda: "no namespaces here")
    assert problems(truths[:1]) == ["reward_model.sandbox: no namespaces here."]


@confined
@pytest.mark.parametrize("word", ["--no-such-option", "--ro-bind"])
def test_a_sandbox_that_fails_is_an_error_and_never_a_score(word, monkeypatch):
    original = bubblewrap.command
    monkeypatch.setattr(bubblewrap, "command", lambda *a, **k: [*original(*a, **k)[:1], word, *original(*a, **k)[1:]])
    with pytest.raises(SandboxError, match="could not start"):
        score("print(3)", SUMS)


@needs_prlimit
def test_nothing_of_a_plain_run_is_left():
    before = psutil.Process().children(recursive=True)  # of tests that ran earlier
    program = Program(("sh", "-c", "setsid sleep 60 & setsid sleep 60"), {"x": b""})
    ended = run.run(program, b"", Limits(0.5, 256, 32, startup=0.5), confined=False)
    assert ended.reason == "time"
    assert not [child for child in psutil.Process().children(recursive=True) if child not in before and runs(child)]


# --- in the pool --------------------------------------------------------------------------------------------------


@confined
def test_in_the_pool_a_slow_program_is_wrong_and_its_row_no_error():
    """The pool's own deadline of half a second is not the programs'."""
    options = ProgramOptions(limits=SHORT)
    rows = [
        RewardRequest("apps", f"```python\n{code}\n```", tests)
        for code, tests in (
            ("print(sum(map(int, input().split())))", SUMS),
            ("while True: pass", SUMS),
            ("1", {"x": 1}),
        )
    ]
    with RewardPool(num_workers=2, timeout=0.5, programs=options) as pool:
        right, slow, broken = pool.score(rows)
    assert right == Score(1.0, {"acc": True, "timed_out": False})
    why = "the program exceeded its limit of time"
    assert slow == Score(0.0, {"acc": False, "timed_out": True, "reason": why})
    assert isinstance(broken, RewardError)
    assert "no known layout" in broken.message


@confined
def test_a_pool_that_is_closed_leaves_no_program():
    options = ProgramOptions(limits=LIMITS)
    pool = RewardPool(num_workers=1, timeout=30, programs=options)
    pool.submit(0, RewardRequest("apps", "```python\nimport time\ntime.sleep(60)\n```", SUMS))
    mine = psutil.Process()

    def running():
        return [p for p in mine.children(recursive=True) if "bwrap" in command_of(p)]

    end = time.monotonic() + 20
    while not running():
        assert time.monotonic() < end
        time.sleep(0.02)
    closing = threading.Thread(target=pool.close)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    assert not running()


@needs_prlimit
def test_config_check_says_what_this_machine_lacks_and_a_run_is_refused(nothing_installed, tmp_path):
    """A login node has no sandbox, and does not train."""
    ended = {}
    for words in (["config", "check"], ["train"]):
        arguments = [
            *base_overrides(write_inputs(tmp_path), tmp_path / "run"),
            f"data.train_files={problems_file(tmp_path)}",
        ]
        arguments = [word for word in arguments if not word.startswith("custom_reward_function")]
        ended[words[0]] = CliRunner().invoke(app, [*words, *arguments, "data.val_files=[]", "trainer.test_freq=-1"])
    lacks = "reward_model.sandbox: bwrap is not installed"
    assert f"note: this machine cannot train it: {lacks}" in ended["config"].output
    assert ended["config"].exit_code == 0
    assert lacks in str(ended["train"].exception)


def problems_file(folder):
    prompt = [{"role": "user", "content": "Add."}]
    row = {"data_source": "apps", "prompt": prompt, "reward_model": {"ground_truth": SUMS}, "extra_info": {"index": 0}}
    return write_jsonl(folder / "code.jsonl", [row] * 8)
