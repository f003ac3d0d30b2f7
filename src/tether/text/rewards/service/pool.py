"""Scores responses in worker processes, concurrently with generation."""

from __future__ import annotations

import pickle
from dataclasses import replace

from tether.runtime.worker_pool import Work, WorkerPool, WorkersFailed
from tether.text.rewards.custom import CustomReward
from tether.text.rewards.outcome import (
    MAX_ANSWER,
    RewardError,
    RewardFailure,
    RewardOutcome,
    RewardRequest,
    load_answer,
)
from tether.text.rewards.sandbox.options import ProgramOptions
from tether.text.rewards.service.protocol import Rewards

LOADING_SECONDS = 60.0
"""Maximum seconds to import a rule before its first call."""


class RewardPool(WorkerPool[tuple[RewardOutcome, float]], Rewards):
    """Worker processes that score responses.

    Args:
        custom: the user's function; None: the rule for the `data_source` (`tether.text.rewards.router`).
        num_workers: number of processes.
        timeout: maximum seconds for a response; after that the process is killed.
        startup_timeout: maximum seconds to load the user's function.
        programs: options of rules that run programs; None: the defaults.

    Raises:
        ValueError: the user's function cannot be loaded.
    """

    def __init__(
        self,
        custom: CustomReward | None = None,
        *,
        num_workers: int,
        timeout: float,
        startup_timeout: float = 60.0,
        programs: ProgramOptions | None = None,
    ) -> None:
        self.durations = []
        programs = programs or ProgramOptions()
        work = Work(
            serve="tether.text.rewards.service.worker:serve",
            begin=lambda _: (custom, programs, timeout),
            name="reward function",
            load=load_answer,
            failed=lambda reason, seconds: (RewardError(reason), seconds),
            limit=MAX_ANSWER,
            max_heartbeat_seconds=timeout if custom else max(timeout, LOADING_SECONDS, programs.deadline),
        )
        super().__init__(work, num_workers=num_workers, timeout=timeout, startup_timeout=startup_timeout)

    def submit(self, index: int, request: RewardRequest) -> None:
        self.put(index, pickle.dumps(replace(request, dialogue=None)))

    def collect(self) -> list[RewardOutcome]:
        try:
            done = self.take_all()
        except WorkersFailed as error:
            raise RewardFailure(str(error)) from error
        self.durations = [seconds for _, seconds in done]
        return [outcome for outcome, _ in done]
