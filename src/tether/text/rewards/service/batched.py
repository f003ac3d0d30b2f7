"""Scores all responses of a step in one call of a user's function, as verl's batch manager does."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

from tether.runtime.worker_pool import Work, WorkerPool, WorkersFailed
from tether.text.rewards.custom import LISTS, CustomReward
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

Answers = list[tuple[RewardOutcome, float]]


class BatchedRewards(Rewards):
    """Calls a function once for all responses, in a separate process.

    Args:
        custom: the user's function. It takes lists and returns a list with one item per response.
        timeout: maximum seconds of the call; then its process is killed and every response has an error.
        startup_timeout: maximum seconds to load the function.

    Raises:
        ValueError: the function cannot be loaded.
    """

    def __init__(self, custom: CustomReward, *, timeout: float, startup_timeout: float = 60.0) -> None:
        work = Work[Answers](
            serve="tether.text.rewards.service.worker:serve",
            begin=lambda _: (replace(custom, arguments=LISTS), ProgramOptions(), timeout),
            name="reward function",
            load=lambda answer: [load_answer(one.encode()) for one in json.loads(answer)],
            failed=lambda reason, seconds: [(RewardError(reason), seconds)],
            limit=8 * MAX_ANSWER,
            max_heartbeat_seconds=timeout,
        )
        self._pool = WorkerPool(work, num_workers=1, timeout=timeout, startup_timeout=startup_timeout)
        self._requests: dict[int, RewardRequest] = {}
        self.durations: list[float] = []

    def submit(self, index: int, request: RewardRequest) -> None:
        assert index not in self._requests, f"request {index} was submitted twice"
        self._requests[index] = replace(request, dialogue=None)

    def collect(self) -> list[RewardOutcome]:
        requests, self._requests = [self._requests[index] for index in sorted(self._requests)], {}
        if not requests:
            return []
        self._pool.put(0, pickle.dumps(requests))
        try:
            (answers,) = self._pool.take_all()
        except WorkersFailed as error:
            raise RewardFailure(str(error)) from error
        if len(answers) != len(requests):  # the process has ended
            answers = answers[:1] * len(requests)
        self.durations = [seconds for _, seconds in answers]
        return [outcome for outcome, _ in answers]

    def close(self) -> None:
        self._pool.close()
