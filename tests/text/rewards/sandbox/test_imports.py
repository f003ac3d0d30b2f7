"""Names of the standard library that a program has without importing them."""

from tether.text.rewards.sandbox.imports import with_imports

SOURCES = [
    ("def f(x: List[int]) -> Optional[int]:\n    return min(x)",
     "from typing import List\nfrom typing import Optional\n"),
    ("class A:\n    @cache\n    def f(self):\n        return isqrt(4), bisect_left([], 1), datetime.date.min",
     "from bisect import bisect_left\nfrom functools import cache\nimport datetime\nfrom math import isqrt\n"),
    ("print(sys.stdin.read(), time.time(), pow(2, 3, 5), open, missing)", "import sys\nimport time\n"),
    ("class A:\n    def gcd(self, a, b):\n        return gcd(a, b)", "from math import gcd\n"),
    ("from typing import *\nimport math as m, re\nx: List = m.pi, re", "from typing import List\n"),
    ("x = '\\d'\nexcept_ = 1\ntry:\n    x\nexcept ValueError as e:\n    e", ""),
    ("def gcd(a, b):\n    return gcd(b, a)", ""),
    ("for count in 1, 2:\n    print(count)\nmatch count:\n    case [e, *pi]:\n        print(e, pi)", ""),
    ("print count", ""),
    ("(" * 100_000, ""),
]  # fmt: skip


def test_what_is_used_and_not_there_is_imported():
    assert [source[:80] for source, lines in SOURCES if with_imports(source) != lines + source] == []


def test_what_is_asked_is_not_imported():
    """An answer without the function would have it."""
    assert with_imports("print(gcd(4, 6))", frozenset({"gcd"})) == "print(gcd(4, 6))"
    method = "class Solution:\n    def gcd(self, a, b):\n        return gcd(a, b)"
    assert with_imports(method, frozenset({"gcd"})) == f"from math import gcd\n{method}"


def test_future_imports_stay_first():
    source = '"""Doc."""\nfrom __future__ import (\n    annotations,\n)\nprint(pi)'
    head, last = source.rsplit("\n", 1)
    assert with_imports(source) == f"{head}\nfrom math import pi\n{last}"
