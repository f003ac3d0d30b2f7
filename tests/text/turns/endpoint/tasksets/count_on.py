"""A taskset of verifiers.v1, as its packages have them: the policy says the number after the one that it is told."""

import verifiers.v1 as vf  # noqa: TID253

__all__ = ["CountOnEnv", "CountOnTaskset"]


class CountOnConfig(vf.TasksetConfig):
    first: int = 0
    count: int = 4
    turns: int = 1
    broken: bool = False


class CountOnData(vf.TaskData):
    answer: str
    turns: int
    broken: bool


def said(trace):
    return [message.content or "" for message in trace.assistant_messages]


class CountOnTask(vf.Task[CountOnData]):
    @vf.reward(weight=0.2)
    async def says_numbers(self, trace: vf.Trace) -> float:
        return sum(word.isdigit() for word in said(trace)) / self.data.turns

    @vf.reward(weight=0.8)
    async def says_the_next(self, trace: vf.Trace) -> float:
        if self.data.broken:
            raise KeyError("nothing here")
        wanted = [str(int(self.data.answer) + turn) for turn in range(self.data.turns)]
        return sum(right in word for word, right in zip(said(trace), wanted, strict=False)) / self.data.turns


class CountOnTaskset(vf.Taskset[CountOnTask, CountOnConfig]):
    def load(self):
        config = self.config
        for index in range(config.count):
            told = config.first + index
            data = CountOnData(
                idx=index, prompt=str(told), system_prompt="Say the next number.", answer=str(told + 1),
                turns=config.turns, broken=config.broken,
            )  # fmt: skip
            yield CountOnTask(data, config.task)


class CountOnEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        """Tell in each further turn what the policy should have said."""
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            for turn in range(1, task.data.turns):
                if segment.terminated:
                    break
                segment = await talk.turn(str(int(task.data.answer) + turn - 1))
