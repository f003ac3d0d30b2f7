"""Scores responses in worker processes, while generation still runs."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

from tether.rewards.custom import CustomReward
from tether.rewards.outcome import MAX_ANSWER, RewardError, RewardFailure, RewardOutcome, RewardRequest, load_answer
from tether.rewards.sandbox.options import ProgramOptions
from tether.runtime.worker_pool import Work, WorkerPool, WorkersFailed

LOADING = 60.0
"""Seconds that importing a rule may take before its first call."""


class RewardPool(WorkerPool[tuple[RewardOutcome, float]]):
    """Worker processes that score responses.

    Args:
        custom: the user's function; None scores by `data_source` (`tether.rewards.router`).
        num_workers: processes.
        timeout: seconds from a request to its answer, after which the process is killed.
        startup_timeout: seconds that loading the user's function may take.
        programs: how rules that run programs do it; None: as by default.

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
        self._durations: list[float] = []
        programs = programs or ProgramOptions()
        work = Work(
            serve="tether.rewards.service.worker:serve",
            begin=lambda _: (custom, programs, timeout),
            name="reward function",
            load=load_answer,
            failed=lambda reason, seconds: (RewardError(reason), seconds),
            limit=MAX_ANSWER,
            longest_beat=timeout if custom else max(timeout, LOADING, programs.deadline),
        )
        super().__init__(work, num_workers=num_workers, timeout=timeout, startup_timeout=startup_timeout)

    @property
    def durations(self) -> list[float]:
        """Seconds of each call of the last `collect`, in its order."""
        return self._durations

    def submit(self, index: int, request: RewardRequest) -> None:
        """Have `request` scored; `collect` returns its outcome at the place that `index` has among the others."""
        self.put(index, pickle.dumps(replace(request, dialogue=None)))

    def collect(self) -> list[RewardOutcome]:
        """Wait for everything submitted since the last call; outcomes ordered by index.

        Raises:
            RewardFailure: a worker ended and could not be started again, so some requests have no outcome.
            Interrupted: a signal asks the run to stop, and a call takes long.
        """
        try:
            done = self.take_all()
        except WorkersFailed as error:
            raise RewardFailure(str(error)) from error
        self._durations = [seconds for _, seconds in done]
        return [outcome for outcome, _ in done]

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        """Score all `requests` and wait for the outcomes, in the same order."""
        for index, request in enumerate(requests):
            self.submit(index, request)
        return self.collect()
