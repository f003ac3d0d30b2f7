"""The processes that run tools and environments: each call has a deadline, and what exceeds it is killed."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field

from tether.runtime.worker_pool import Work, WorkerPool
from tether.tools.spec import Talkers
from tether.types import ExtraInfo, JsonObject, Message

MAX_ANSWER = 1 << 22
"""Bytes of the longest answer of a process."""
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True)
class Reply:
    """The answer to a turn, or to one call in it."""

    messages: list[dict[str, str]] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    error: str = ""
    """Why there is no answer: it raised, took too long, or ended its process."""


@dataclass(frozen=True)
class CallRequest:
    """Call a tool."""

    name: str
    arguments: dict[str, object]
    kwargs: ExtraInfo
    """Arguments that the row adds for this tool."""


@dataclass(frozen=True)
class StepRequest:
    """Step an environment. The whole conversation goes along, so that any process can take it up."""

    name: str
    batch: int
    """Number of the rollout; sessions of another one are dropped."""
    row: int
    about: ExtraInfo
    """`data_source`, `ground_truth` and `extra_info` of the row."""
    messages: Sequence[Message]
    """The prompt."""
    turns: Sequence[Sequence[Message]]
    """Messages since: replies to the turn before, then the turn, as often as the policy had one."""


@dataclass(frozen=True)
class LoadRequest:
    """See whether the class of an environment can be loaded."""

    name: str


class ToolPool(WorkerPool[Reply]):
    """Worker processes with all tools and environments of a run.

    Args:
        talkers: what they run.
        num_workers: processes.
        timeout: seconds that a call or a step may take.
        startup_timeout: seconds that loading a class may take.

    Raises:
        ValueError: a class cannot be loaded or made.
    """

    def __init__(self, talkers: Talkers, *, num_workers: int, timeout: float, startup_timeout: float = 60.0) -> None:
        work = Work(
            serve="tether.tools.worker:serve",
            begin=lambda told: (talkers, told["of_servers"] if told else {}, timeout),
            name="tools and environments",
            load=_load,
            failed=lambda reason, _: Reply(error=reason),
            limit=MAX_ANSWER,
            longest_beat=timeout,
        )
        self._next_index = 0
        super().__init__(work, num_workers=num_workers, timeout=timeout, startup_timeout=startup_timeout)

    @property
    def schemas(self) -> list[JsonObject]:
        """Of the tools, as a chat template takes them."""
        schemas: list[JsonObject] = self.about["schemas"]
        return list(schemas)

    def ask(self, request: CallRequest | StepRequest | LoadRequest, worker: int | None = None) -> int:
        """Have a request answered; `take` waits for the answer to the number that this returns."""
        self._next_index += 1
        self.put(self._next_index, pickle.dumps(request), worker)
        return self._next_index

    def check(self, name: str) -> None:
        """Load an environment that a row names.

        Raises:
            ValueError: it cannot be loaded.
        """
        if error := self.take(self.ask(LoadRequest(name))).error:
            raise ValueError(error)


def _load(answer: bytes) -> Reply:
    try:
        fields = json.loads(answer)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    match fields:
        case [list(messages), float(reward), bool(done), str(problem)]:
            if not (math.isfinite(reward) and abs(reward) <= _FLOAT32_MAX):
                return Reply(error=f"its reward is {reward}; a reward is finite and fits into float32")
            return Reply(messages, reward, done, problem)
    raise ValueError("not the answer of a tool")
