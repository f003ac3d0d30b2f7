"""A taskset of verifiers.v1 without end, whose tasks have a tool."""

import itertools

import verifiers.v1 as vf  # noqa: TID253

__all__ = ["AdderTaskset"]


class Adder(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "adder"

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Return the sum."""
        return a + b


class AdderTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

    @vf.reward(weight=0.5)
    async def repeats_the_tool(self, trace: vf.Trace) -> float:
        results = [message.content for message in trace.tool_messages]
        return float(trace.last_reply in results)


class AdderTaskset(vf.Taskset[AdderTask]):
    INFINITE = True

    def load(self):
        for index in itertools.count():
            yield AdderTask(vf.TaskData(idx=index, prompt=f"{index} + 1"), self.config.task)


if __name__ == "__main__":
    Adder.run()
