"""The protocol of a kind of inference server: its command line, its routes and their payloads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tether.rollout.protocol import SamplingParams
from tether.rollout.servers.http import Connections
from tether.rollout.servers.transfer import Outgoing

_ROUNDING = 0.01  # that a log-prob may be above 0


@dataclass(frozen=True)
class Launch:
    """Settings of a server of our own."""

    python: Path
    """Interpreter of an environment that has it."""
    module: str
    """That is run, as by ``python -m``."""
    options: Mapping[str, object]
    """Of the server: name without dashes -> value; True is a flag, None leaves it out."""
    environment: Mapping[str, str]
    log: Path
    says_no: bool
    """False is a flag, ``--no-NAME``; else it leaves the option out."""
    eager: str
    """The option by which it compiles nothing when it starts."""

    def command(self, port: int) -> list[str]:
        """The command line."""
        words = [str(self.python), "-m", self.module, "--host=127.0.0.1", f"--port={port}"]
        for name, value in self.options.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words += [f"--{flag}"] if value else [f"--no-{flag}"] if self.says_no else []
            elif value is not None:
                words.append(f"--{flag}={value}")
        return words


@dataclass(frozen=True)
class Draw:
    """One row that is asked for."""

    prompt: list[int]
    sampling: SamplingParams
    """Temperature, cuts and lengths; `n` is the engine's business."""
    most: int
    """Tokens at most."""
    seed: int
    """Below 2**31."""
    ends: list[int]
    """Tokens that end it."""
    records: bool
    """Whether to tell which tokens could have been drawn at each position."""


@dataclass(frozen=True)
class Sampled:
    """A row as a server drew it."""

    token_ids: list[int]
    log_probs: list[float]
    """Under the distribution that each token was drawn from."""
    kept: list[list[int]] | None
    """Tokens that could have been drawn at each position, where that was asked for."""
    weights: frozenset[str]
    """Names of the weights that drew it."""
    whole: bool = True
    """False: it was broken off, and has the tokens until then, if any."""
    experts: NDArray[np.int16] | None = None
    """[prompt and tokens but the last, L, k]: where each went, in each decoder layer, where the server tells that."""

    def check(self, draw: Draw, vocabulary: int) -> None:
        """See that it answers a draw: tokens of the policy, no more than were asked for, up to an end, with log-probs.

        Raises:
            ValueError: it does not.
        """
        tokens, count, ends = self.token_ids, len(self.token_ids), set(draw.ends)
        for token in (*tokens, *(token for kept in self.kept or () for token in kept)):
            if type(token) is not int or not 0 <= token < vocabulary:
                raise ValueError(f"the token {token!r}, where the policy has {vocabulary}")
        for log_prob in self.log_probs:
            if type(log_prob) not in (int, float) or not -math.inf < log_prob < _ROUNDING:
                raise ValueError(f"the log-prob {log_prob!r}")
        if len(self.log_probs) != count:
            raise ValueError(f"{len(self.log_probs)} log-probs of {count} tokens")
        if count > draw.most:
            raise ValueError(f"{count} tokens, where {draw.most} were asked for")
        if not ends.isdisjoint(tokens[:-1]):
            raise ValueError("tokens after one that ends the response")
        if self.whole and count < draw.most and not ends.intersection(tokens[-1:]):
            raise ValueError(f"{count} tokens of {draw.most}, and none of them ends the response")

    def with_experts(self, draw: Draw, experts: NDArray[np.int16] | None) -> Sampled:
        """The same with what the server told of the experts of a draw that asks for them.

        Raises:
            ValueError: they are of other tokens.
        """
        tokens = len(draw.prompt) + len(self.token_ids) - 1
        if experts is not None and len(experts) != tokens:
            raise ValueError(f"its experts are of {len(experts)} tokens, not of {tokens}")
        return replace(self, experts=experts)


@dataclass(frozen=True)
class Policy:
    """The policy that a server is to run."""

    model_type: str
    """As transformers names it."""
    vocabulary: int
    """Tokens that it has; a server's tokenizer is never used."""
    dtype: str | None = None
    """That the server is to compute in; None: any."""
    longest: int = 0
    """Most tokens of prompt and response together."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Of its layers, as transformers names them."""


def check_formats(
    url: str, wanted: Policy, *, dtype: str | None, longest: int | None, options: tuple[str, str]
) -> None:
    """See that a server computes in the numbers of the run, and cuts no response off.

    Args:
        url: of the server.
        wanted: the policy that it is to run.
        dtype: that it computes in; None: it does not tell.
        longest: tokens of prompt and response that it takes; None: it does not tell.
        options: of its command line, for the two.

    Raises:
        ValueError: it does not.
    """
    if dtype is not None and wanted.dtype is not None and dtype != wanted.dtype:
        key = "actor_rollout_ref.rollout.dtype"
        raise ValueError(
            f"{url}: computes in {dtype}; {key} is {wanted.dtype}. "
            f"Start it with {options[0]} {wanted.dtype}, or set {key}={dtype}"
        )
    if longest is not None and longest < wanted.longest:
        raise ValueError(
            f"{url}: takes {longest} tokens of prompt and response; this run needs {wanted.longest} "
            "(actor_rollout_ref.rollout.prompt_length + response_length, or max_model_len). "
            f"Start it with {options[1]} {wanted.longest}, or lower these"
        )


def experts_missing(url: str, how: str) -> ValueError:
    """The error of a server that does not tell what was asked for."""
    key = "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
    return ValueError(f"{url}: does not tell the experts of tokens, which {key} asks for. Start it with {how}")


class Dialect(Protocol):
    """One kind of server. Every method raises `ServerGone` and `ServerRefuses` as `Connections` does."""

    name: str
    """As `actor_rollout_ref.rollout.name` has it."""
    title: str
    """As its makers write it."""
    how: str
    """The page that says how one is started, as the end of a sentence."""
    options: str
    """Its options that decide about log-probs."""
    health_asleep: str
    """A route that costs nothing, while it sleeps."""

    def look(self, http: Connections, within: float) -> None:
        """See that it is a server that can be used, and make it ready to be.

        Raises:
            ValueError: it is of another kind or version, or runs another model.
        """
        ...

    def sample(self, http: Connections, draw: Draw, within: float) -> Sampled:
        """Draw a row. Half an answer is none: `ServerGone`."""
        ...

    def interrupt(self, http: Connections, within: float) -> None:
        """Break off what it samples: each request is answered with the tokens that it has."""
        ...

    def weights(self, http: Connections, within: float) -> str | None:
        """Name of the weights that it has."""
        ...

    def give(self, http: Connections, name: str, weights: Outgoing, within: float) -> None:
        """Give it new weights of this name.

        Args:
            http: the server.
            name: of the weights.
            weights: by their names in transformers.
            within: seconds for each request.
        """
        ...

    def forget(self, http: Connections, within: float) -> None:
        """Empty its prefix cache."""
        ...

    def sign_of_life(self, http: Connections, within: float) -> float | None:
        """A number that goes on changing while it samples; None where there is none."""
        ...

    def sleep(self, http: Connections, within: float) -> None:
        """Give memory back."""
        ...

    def wake(self, http: Connections, within: float) -> None:
        """Be ready to sample and to take weights again."""
        ...

    def cures(self) -> Mapping[str, Callable[[Connections, float], None]]:
        """Parts of a server that may be stale, the likeliest first, each with the request that renews it."""
        ...


@runtime_checkable
class TakesAdapters(Dialect, Protocol):
    """One kind of server that computes with adapters (LoRA), where it was started to."""

    def adapt(self, http: Connections, name: str, adapters: dict[str, Tensor], within: float) -> None:
        """Put adapters in the place of those that it has; with the weights below them they now have this name.

        Args:
            http: the server.
            name: of the weights, adapters included.
            adapters: tensors on the host, by peft's names in a file.
            within: seconds for each request.
        """
        ...
