"""Questions and programming problems for `benchmarks.scorers`, in the layouts of Search-R1 and of APPS."""

from __future__ import annotations

from collections.abc import Sequence

from tether.types import JsonObject


def _question(*answers: str) -> JsonObject:
    return {"reward_model": {"ground_truth": {"target": list(answers)}}}


QUESTIONS: Sequence[JsonObject] = [
    _question("The Beatles", "Beatles"),
    _question("Paris"),
    _question("J. R. R. Tolkien", "John Ronald Reuel Tolkien"),
    _question("a cappella"),
    _question("1969", "July 20, 1969"),
    _question("St. John's, Newfoundland"),
    _question("rock 'n' roll", "rock and roll"),
    _question("Vitamin A"),
    _question("3.5 million"),
    _question("the United States of America", "USA", "U.S.A."),
    _question("São Paulo"),
    _question("20,000 Leagues Under the Sea"),
    _question("half-life"),
    _question("An American in Paris"),
    _question("$1.50"),
    _question("yes"),
]
"""Ground truths of the kinds that question-answering sets have: articles, points, commas, numbers, several names."""


def search_replies(row: JsonObject, truth: dict[str, list[str]], other: dict[str, list[str]]) -> dict[str, str]:
    """Replies to a question."""
    known, another = truth["target"], other["target"][0]
    tagged = f"<answer>{known[0]}</answer>"
    return {
        "an answer": f"<search>who</search> So it is. {tagged}",
        "the last of its answers": f"<answer>{known[-1]}</answer>",
        "with spaces and lines": f"<answer>\n  {known[0]}  \n</answer>",
        "in capitals": f"<answer>{known[0].upper()}</answer>",
        "with articles": f"<answer>the {known[0]}</answer>",
        "with a full stop": f"<answer>{known[0]}.</answer>",
        "in a sentence": f"<answer>It is {known[0]}.</answer>",
        "without tags": f"The answer is {known[0]}.",
        "another's, then its own": f"<answer>{another}</answer> No. {tagged}",
        "its own, then another's": f"{tagged} No. <answer>{another}</answer>",
        "another row's": f"<answer>{another}</answer>",
        "eleven times": tagged * 11,
        "not closed": f"<answer>{known[0]}",
        "tags within tags": f"<answer>so <answer>{known[0]}</answer>",
        "empty tags": "<answer></answer>",
        "nothing": "",
    }


def _problem(right: str, half: str, inputs: list[object], outputs: list[object], name: str | None = None) -> JsonObject:
    """A problem, a program that solves it, and one that passes some of its tests."""
    tests = {"inputs": inputs, "outputs": outputs, **({"fn_name": name} if name else {})}
    return {"right": right, "half": half, "reward_model": {"ground_truth": tests}}


PROBLEMS: Sequence[JsonObject] = [
    _problem(
        "a, b = map(int, input().split())\nprint(a + b)",
        "a, b = map(int, input().split())\nprint(a + a)",
        ["1 2\n", "3 3\n", "-4 9\n", "0 0\n"],
        ["3\n", "6\n", "5\n", "0\n"],
    ),
    _problem(
        "n = int(input())\nfor _ in range(n):\n    print(*sorted(map(int, input().split())))",
        "n = int(input())\nfor _ in range(n):\n    print(*map(int, input().split()))",
        ["2\n3 1 2\n9 8\n", "1\n1 2\n"],
        ["1 2 3\n8 9\n", "1 2\n"],
    ),
    _problem(
        "import sys\nprint(len(sys.stdin.read().split()))",
        "import sys\nprint(len(sys.stdin.readline().split()))",
        ["one two\nthree\n", "one\n", "a b c d"],
        ["3\n", "1", "4\n"],
    ),
    _problem(
        "print('YES' if input() == input() else 'NO')",
        "print('YES')",
        ["ab\nab\n", "ab\nba\n", "x\nx\n"],
        ["YES\n", "NO\n", "YES\n"],
    ),
    _problem(
        "x = float(input())\nprint(x / 3)",
        "x = int(float(input()))\nprint(x // 3)",
        ["3\n", "1\n", "0.5\n"],
        ["1.0\n", "0.3333333333333333\n", "0.16666666666666666\n"],
    ),
    _problem(
        "s = input()\nfor i in range(3):\n    print(s[i:])",
        "s = input()\nprint(s)",
        ["abc\n", "xyzw\n"],
        ["abc\nbc\nc\n", "xyzw\nyzw\nzw\n"],
    ),
    _problem(
        "def add(a, b):\n    return a + b", "def add(a, b):\n    return 2 * a", ["1\n2", "3\n3"], ["3", "6"], "add"
    ),
    _problem(
        "class Solution:\n    def top(self, xs):\n        return sorted(xs)[-2:]",
        "class Solution:\n    def top(self, xs):\n        return xs[-2:]",
        ["[3, 1, 2]", "[1, 2]"],
        ["[2, 3]", "[1, 2]"],
        "top",
    ),
    _problem(
        "def reverse(s):\n    return s[::-1]",
        "def reverse(s):\n    return s",
        ['"ab"', '"aa"'],
        ['"ba"', '"aa"'],
        "reverse",
    ),
]
"""Problems with tests on input and output, and with functions and methods that are called."""


def program_replies(row: JsonObject, truth: object, other: object) -> dict[str, str]:
    """Replies to a problem."""
    right = row["right"]

    def block(code: str, tag: str = "python") -> str:
        return f"So it goes:\n```{tag}\n{code}\n```\nDone."

    return {
        "right": block(right),
        "right without a block": right,
        "right, printing a blank line": block(f"{right}\nprint()"),
        "partly right": block(row["half"]),
        "raises": block("raise ValueError"),
        "does not parse": block("def ("),
        "exits with 0": block("import sys\nsys.exit(0)"),
        "prints nothing": block("pass"),
        "another program, then right": f"{block('print(7)')}\n{block(right)}",
        "right, then another program": f"{block(right)}\n{block('print(7)')}",
        "a block without a language": block(right, tag=""),
        "words": "I do not know.",
        "nothing": "",
    }
