"""The processes that run tools and environments: each call has a deadline, and a process that exceeds it is killed."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field

from tether.runtime.worker_pool import Work, WorkerPool
from tether.text.turns.tools.spec import ResponderSpecs
from tether.types import ExtraInfo, JsonObject, Message

MAX_ANSWER = 1 << 22
"""Maximum size of a process's answer in bytes."""
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True)
class Reply:
    """The reply to a turn of the policy, or to one call in it."""

    messages: list[dict[str, str]] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    error: str = ""
    """The reason why there is no reply: the call raised an error, timed out, or ended its process."""


@dataclass(frozen=True)
class CallRequest:
    """A request to call a tool."""

    name: str
    arguments: dict[str, object]
    kwargs: ExtraInfo
    """Additional arguments from the row for this tool."""


@dataclass(frozen=True)
class StepRequest:
    """A request to step an environment. It contains the entire conversation, so that any process can continue it."""

    name: str
    batch: int
    """Index of the rollout; sessions of earlier ones are dropped."""
    row: int
    row_info: ExtraInfo
    """`data_source`, `ground_truth` and `extra_info` of the row."""
    messages: Sequence[Message]
    """Messages of the prompt."""
    turns: Sequence[Sequence[Message]]
    """Messages after the prompt; each item has the replies to the previous turn, followed by a turn of the policy."""


@dataclass(frozen=True)
class LoadRequest:
    """A request to check that the class of an environment can be loaded."""

    name: str


class ToolPool(WorkerPool[Reply]):
    """Worker processes with all tools and environments of a run.

    Args:
        specs: the tools and environments.
        num_workers: number of processes.
        timeout: maximum seconds of a call or a step.
        startup_timeout: maximum seconds to load a class.

    Raises:
        ValueError: a class cannot be loaded or instantiated.
    """

    def __init__(
        self, specs: ResponderSpecs, *, num_workers: int, timeout: float, startup_timeout: float = 60.0
    ) -> None:
        work = Work(
            serve="tether.text.turns.tools.worker:serve",
            begin=lambda about: (specs, about["server_tools"] if about else {}, timeout),
            name="tools and environments",
            load=_load,
            failed=lambda reason, _: Reply(error=reason),
            limit=MAX_ANSWER,
            max_heartbeat_seconds=timeout,
        )
        super().__init__(work, num_workers=num_workers, timeout=timeout, startup_timeout=startup_timeout)

    @property
    def schemas(self) -> list[JsonObject]:
        """Return the schemas of the tools, in the layout of chat templates."""
        schemas: list[JsonObject] = self.about["schemas"]
        return list(schemas)

    def ask(self, request: CallRequest | StepRequest | LoadRequest, worker: int | None = None) -> int:
        """Submit a request and return its index, for which `take` returns the reply."""
        return self.enqueue(pickle.dumps(request), worker)

    def check(self, name: str) -> None:
        """Check that an environment that a row names can be loaded.

        Raises:
            ValueError: the environment cannot be loaded.
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
                return Reply(error=f"its reward is {reward}; a reward must be finite and fit into float32")
            return Reply(messages, reward, done, problem)
    raise ValueError("not the answer of a tool")
