"""Promise 4 for programs: what a program printed before it failed earns nothing."""

import pytest

from tests.text.rewards.sandbox.machine import needs_prlimit
from tether.text.rewards.sandbox import Limits, ProgramOptions
from tether.text.rewards.sandbox.reward import ProgramReward

TESTS = {"inputs": ["1 2\n"], "outputs": ["3\n"]}


@needs_prlimit
@pytest.mark.parametrize(("end", "score"), [("", 1.0), ("raise SystemExit(1)", 0.0)])
def test_the_right_output_of_a_program_that_fails_is_wrong(end: str, score: float) -> None:
    limits = Limits(seconds=5, memory_mb=256, processes=16)
    reward = ProgramReward(ProgramOptions(unconfined=True, limits=limits))
    program = f"print(sum(map(int, input().split())), flush=True)\n{end}"
    assert reward("apps", f"```python\n{program}\n```", TESTS, {})["score"] == score
