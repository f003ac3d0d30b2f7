"""An environment of verifiers.v1 with two roles."""

import verifiers.v1 as vf  # noqa: TID253

__all__ = ["PairEnv", "PairTaskset"]


class PairTaskset(vf.Taskset[vf.Task]):
    def load(self):
        return [vf.Task(vf.TaskData(idx=0, prompt="1"), self.config.task)]


class PairConfig(vf.EnvConfig):
    asks: vf.AgentConfig = vf.AgentConfig()
    says: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairConfig]):
    async def run(self, task, agents):
        for agent in agents:
            await agent.run(task)
