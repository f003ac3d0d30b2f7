"""The interface of a server that the engine uses, on this machine (`server`) or on the node of a rank (`hosted`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tether.text.servers.api import GenerateRequest, SampledRow, ServerApi
from tether.text.servers.http import Connections, ServerGone


@dataclass(frozen=True)
class Traffic:
    """Sizes and dtypes of the data that is sent to servers."""

    dtype: torch.dtype
    """The dtype that the servers compute in."""
    bucket: int
    """Bytes of weights that are sent at a time."""
    skipped: frozenset[str]
    """Names of tied weights, which are sent under another name."""
    max_num_seqs: int
    """Maximum number of concurrent requests per server."""
    sleeps: bool
    """Whether the servers release their memory while nothing is sampled."""
    lora_scale: float = 1.0
    """Scale of the adapters when they are merged into the layers for sending."""
    adapters: bool = False
    """Whether layers are sent once without their adapters, and then only the adapters after each update."""
    has_base_layers: bool = False
    """Whether servers start with the layers below the adapters, so that these are not sent."""
    restores_last_weights: bool = False
    """Whether a restarted server gets the weights that were loaded last, because training may be changing the current
    ones."""


@dataclass(frozen=True)
class NamedUpdate:
    """Weights for servers, and how they are sent."""

    tensors: Iterable[tuple[str, Tensor]]
    """Names and values, as in `WeightUpdate.tensors`."""
    name: str
    """The name under which servers report these weights."""
    run: str
    """Prefix of the names of all weights of this run."""
    traffic: Traffic


class SamplingServer(ABC):
    """A server as `tether.text.servers.engine.ServedEngine` uses it."""

    api: ServerApi
    token_timeout: float
    """Seconds within which it must sample at least one token."""
    bytes_sent: int
    """Bytes of weights sent to it so far."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Return its address or name, for messages."""

    @abstractmethod
    def start(self) -> None:
        """Start the server if tether launches it and it is not running; it is not ready yet."""

    @abstractmethod
    def wait_ready(self) -> None:
        """Wait until the server responds, and check that it can be used.

        Raises:
            ServerGone: it had been ready and stopped responding, or a signal ended it while it started.
            ValueError: it does not start, is of another kind or version, or is used by another run.
        """

    @abstractmethod
    def is_healthy(self) -> bool:
        """Return whether its health check succeeds."""

    @abstractmethod
    def generate(self, request: GenerateRequest, vocabulary: int) -> SampledRow:
        """Return a row, sampled with the current weights.

        Raises:
            ServerGone: no response, an incomplete one, one that does not fit the request, or one with other weights.
            ServerRefuses: the request is refused.
        """

    @abstractmethod
    def abort(self) -> None:
        """Abort all requests; `generate` then returns the tokens so far.

        Raises:
            ServerGone: it does not respond.
            ValueError: it does not support this.
        """

    @abstractmethod
    def cut(self) -> None:
        """Make all pending requests raise `ServerGone`."""

    @abstractmethod
    def run(self, action: Callable[[Connections, float], None]) -> None:
        """Execute one of the API's recovery actions."""

    @abstractmethod
    def has_weights(self, weights: str) -> bool:
        """Return whether it still has these weights; False for a server that was restarted."""

    @classmethod
    @abstractmethod
    def load(cls, servers: Sequence[Self], update: NamedUpdate) -> dict[Self, ServerGone]:
        """Load new weights into servers that are ready, and return those that died.

        Raises:
            ValueError: a server refuses them.
        """

    @abstractmethod
    def progress_counter(self, timeout: float) -> float | None:
        """Return `ServerApi.progress_counter`; None also if it does not respond in time."""

    @abstractmethod
    def sleep(self) -> None:
        """Make a server that tether launched release its memory.

        Raises:
            ServerGone: it does not respond.
            ValueError: it does not support this.
        """

    @abstractmethod
    def wake(self) -> None:
        """Undo `sleep`; a cheap request detects a hanging server within seconds."""

    @abstractmethod
    def restart(self) -> None:
        """Stop and start the server if tether launched it; otherwise only cut pending requests."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the server if tether launched it, or release the external one, and cut pending requests."""

    @abstractmethod
    def explained(self, error: Exception) -> str:
        """Return an error message, with the first error in the log of a launched server."""

    @abstractmethod
    def next_step(self) -> str:
        """Return, for the log, whether the server is restarted or what its owner should do."""

    @abstractmethod
    def fault(self) -> str:
        """Return the first error in the log of a launched server; empty if there is none, or if it only says that a
        process died."""
