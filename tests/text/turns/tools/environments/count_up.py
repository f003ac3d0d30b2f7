"""Environments of the library verifiers, as its packages have them: a module with `load_environment`."""

import verifiers as vf  # noqa: TID253
from datasets import Dataset  # noqa: TID253


class CountUp(vf.MultiTurnEnv):
    """The policy is told numbers, and says the next one."""

    async def setup_state(self, state):
        state["told"] = int(state["answer"])
        return state

    @vf.stop
    async def counted_far(self, state):
        return state["told"] >= int(state["answer"]) + 2

    async def env_response(self, messages, state, **kwargs):
        state["told"] += 1
        return [vf.UserMessage(content=str(state["told"]))]


def said(completion):
    return [message["content"] for message in completion if message["role"] == "assistant"]


def digits(completion, answer, **kwargs):
    """Share of turns with the number after the one that was told."""
    wanted = [str(int(answer) + 1 + turn) for turn in range(3)]
    return sum(word == right for word, right in zip(said(completion), wanted, strict=False)) / 3


def broken(completion):
    raise KeyError("nothing here")


def together(completions, answers):
    return [0.0] * len(completions)


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one number.
        b: the other.
    """
    return a + b


def load_environment(kind="turns", first=0, reward="digits"):
    rubric = vf.Rubric(funcs=[{"digits": digits, "broken": broken, "together": together}[reward]])
    rows = Dataset.from_list([
        {"prompt": [{"role": "user", "content": str(first + number)}], "answer": str(first + number)}
        for number in range(4)
    ])  # fmt: skip
    options = {"dataset": rows, "rubric": rubric}
    if kind == "tools":
        return vf.ToolEnv(tools=[add], max_turns=3, **options)
    if kind == "single":
        return vf.SingleTurnEnv(eval_dataset=rows.select(range(2)), **options)
    return CountUp(max_turns=5, **options)
