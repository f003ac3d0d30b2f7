"""What a process of tools answers is a number where it pays, and does not depend on what the process did before."""

from pathlib import Path

import pytest

from tether.text.turns.tools import EnvironmentSpec, ResponderSpecs, ToolPool, ToolSpec
from tether.text.turns.tools.pool import CallRequest, StepRequest

FILE = """
import random

class Pays:
    schema = {"type": "function", "function": {"name": "pays"}}

    def call(self, reward):
        return "paid", float(reward)

class Dice:
    def reset(self, messages, row):
        self.rolled = []

    def step(self, messages):
        self.rolled.append(random.random())
        return str(self.rolled), 0.0, False
"""


@pytest.fixture
def pool(tmp_path: Path):
    file = tmp_path / "answers.py"
    file.write_text(FILE)
    specs = ResponderSpecs((ToolSpec(f"{file}:Pays", {}, None, "tools[0]"),), {"dice": EnvironmentSpec(f"{file}:Dice")})
    with ToolPool(specs, num_workers=1, timeout=20) as pool:
        yield pool


@pytest.mark.parametrize("reward", ["inf", "nan", "1e39"])
def test_a_reward_that_float32_does_not_hold_is_an_error(pool: ToolPool, reward: str) -> None:
    reply = pool.take(pool.ask(CallRequest("pays", {"reward": reward}, {})))
    assert "a reward must be finite and fit into float32" in reply.error
    assert reply.reward == 0
    assert pool.take(pool.ask(CallRequest("pays", {"reward": "2"}, {}))).reward == 2


def test_what_an_environment_draws_depends_on_the_conversation_alone(pool: ToolPool) -> None:
    """Another one that is stepped between two turns of the first changes nothing of it."""

    def roll(turns: list[str], row: int, batch: int) -> list[dict[str, str]]:
        spoken = [[{"role": "assistant", "content": turn}] for turn in turns]
        request = StepRequest("dice", batch, row, {"extra_info": {}}, [{"role": "user", "content": "go"}], spoken)
        return pool.take(pool.ask(request)).messages

    alone = [roll(["a", "b"][:turn], row=0, batch=0) for turn in (1, 2)]
    first = roll(["a"], row=0, batch=1)
    other = roll(["c"], row=1, batch=1)
    assert [first, roll(["a", "b"], row=0, batch=1)] == alone
    assert other != first
