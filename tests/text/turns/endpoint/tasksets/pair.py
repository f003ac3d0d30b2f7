"""An environment of verifiers.v1 with two roles."""

import verifiers.v1 as vf  # noqa: TID253

__all__ = ["PairEnv", "PairTaskset"]


class PairTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def says_one(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "1")


class PairTaskset(vf.Taskset[PairTask]):
    def load(self):
        return [PairTask(vf.TaskData(idx=0, prompt="?"), self.config.task)]


class PairConfig(vf.EnvConfig):
    asks: vf.AgentConfig = vf.AgentConfig()
    says: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairConfig]):
    async def run(self, task, agents):
        await agents.asks.run(task)
        await agents.says.run(task)
