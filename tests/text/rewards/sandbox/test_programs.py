"""Programs of contests count on the standard library, on input and output as files, and on a deep stack."""

import resource
import shutil

import pytest

from tests.text.rewards.sandbox.test_reward import SUMS, both, score
from tether.text.rewards.sandbox import bubblewrap
from tether.text.rewards.sandbox.languages import LANGUAGES

PRODUCT = "class Solution:\n    def product(self, a: int, b: int) -> Optional[int]:\n        return prod([a, b])"


ANSWERS = [
    ("print(sum(deque(map(int, sys.stdin.read().split()))))", SUMS, 1),
    (PRODUCT, {"fn_name": "product", "inputs": [[2, 3]], "outputs": [6]}, 1),
    ("def f(n):\n    return n and 1 + f(n - 1)\nprint(f(9000) - 9000 + sum(map(int, input().split())))", SUMS, 1),
    ("@cache\ndef f(n):\n    return isqrt(n)", {"test_list": ["assert f(9) == 3"]}, 1),
    ("print(gcd(4, 6))", {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}, 0),
    ("def gdc(a, b):\n    return gcd(b, a % b) if b else a", {"test_list": ["assert gcd(4, 6) == 2"]}, 0),
]  # fmt: skip


@both
def test_the_standard_library_is_there_and_is_no_answer(unconfined):
    got = [score(code, tests, unconfined=unconfined)["score"] for code, tests, _ in ANSWERS]
    assert got == [expected for _, _, expected in ANSWERS]


@both
@pytest.mark.parametrize(("language", "code"), [
    ("python", "print(sum(map(int, open('/dev/stdin').read().split())), file=open('/dev/stdout', 'w'))"),
    ("javascript", "const s = require('fs').readFileSync('/dev/stdin', 'utf8').split(' ').map(Number)\n"
     "console.log(s[0] + s[1])"),
    ("bash", "read a b < /dev/stdin\necho $((a + b)) > /dev/stdout"),
])  # fmt: skip
def test_input_and_output_are_files(language, code, unconfined):
    if missing := [name for name in LANGUAGES[language].needs if not shutil.which(name, path=bubblewrap.PATH)]:
        pytest.skip(f"not installed: {missing}")
    assert score(code, SUMS, tag=language, languages=(language,), unconfined=unconfined)["score"] == 1


@both
@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY, reason="stacks are limited")
def test_recursion_may_be_deep(unconfined):
    """Each level of a cached function takes half a kilobyte of the stack, of which processes have 8 MiB by default."""
    tests = {"inputs": ["40000"], "outputs": ["40000"]}
    code = "@cache\ndef f(n):\n    return n and 1 + f(n - 1)\nsys.setrecursionlimit(10**6)\nprint(f(int(input())))"
    assert score(code, tests, unconfined=unconfined)["score"] == 1
