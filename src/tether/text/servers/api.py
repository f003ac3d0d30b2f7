"""The interface to a kind of inference server: its command line, its routes and their payloads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tether.text.sampling.protocol import SamplingParams
from tether.text.servers.http import Connections
from tether.text.servers.transfer import WeightPayload

_ROUNDING = 0.01  # by which a log-prob may exceed 0


@dataclass(frozen=True)
class Launch:
    """Settings for launching a server."""

    python: Path
    """Interpreter of an environment that has the server installed."""
    module: str
    """Python module to launch (``python -m MODULE``)."""
    options: Mapping[str, object]
    """Options of the server: name without dashes -> value; True is a flag, None omits the option."""
    environment: Mapping[str, str]
    log: Path
    has_negative_flags: bool
    """Whether False is passed as the flag ``--no-NAME``; otherwise False omits the option."""
    eager: str
    """The option that disables compilation at the start."""
    socket_folder: str | None = None
    """Environment variable that names the folder of the server's sockets, which remain if the server is killed."""

    def check_node(self, node: str, title: str) -> None:
        """Check that this machine has the environment of the server and the folder of the run.

        Args:
            node: name of this machine.
            title: name of the kind of server.

        Raises:
            ValueError: one of them is missing.
        """
        if not self.python.exists():
            raise ValueError(
                f"{node}: has no {title} at {self.python}, where the machine of the command has it. "
                "Run tether setup there, at the same path"
            )
        if not self.log.parent.exists():
            raise ValueError(
                f"{node}: has no folder {self.log.parent}. The folder of the run (trainer.default_local_dir) must be "
                "at the same path on all machines"
            )

    def command(self, port: int) -> list[str]:
        """Return the command line."""
        words = [str(self.python), "-m", self.module, "--host=127.0.0.1", f"--port={port}"]
        for name, value in self.options.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words += [f"--{flag}"] if value else [f"--no-{flag}"] if self.has_negative_flags else []
            elif value is not None:
                words.append(f"--{flag}={value}")
        return words


@dataclass(frozen=True)
class GenerateRequest:
    """A request for one row."""

    prompt_ids: list[int]
    sampling: SamplingParams
    """Sampling parameters; temperature, top_k and top_p are used, while the engine handles lengths and `n`."""
    max_tokens: int
    """Maximum number of sampled tokens."""
    seed: int
    """Seed below 2**31."""
    stop_token_ids: list[int]
    """Tokens that end the row."""
    return_kept_tokens: bool
    """Whether to return the tokens that could be sampled at each position."""


@dataclass(frozen=True)
class SampledRow:
    """A row as a server sampled it."""

    token_ids: list[int]
    log_probs: list[float]
    """Log-probabilities under the distribution that each token was sampled from."""
    kept_tokens: list[list[int]] | None
    """Tokens that could be sampled at each position, if requested."""
    weight_names: frozenset[str]
    """Names of the weights that sampled it."""
    is_complete: bool = True
    """False: the request was aborted, and the row has the tokens sampled until then."""
    experts: NDArray[np.int16] | None = None
    """[prompt and sampled tokens without the last one, L, k]: the experts of each token in each decoder layer, if the
    server returns them."""

    def check(self, request: GenerateRequest, vocabulary: int) -> None:
        """Check that the row fits the request: tokens of the policy, not too many, ended by a stop token if shorter,
        with log-probs.

        Raises:
            ValueError: it does not fit.
        """
        tokens, count, stops = self.token_ids, len(self.token_ids), set(request.stop_token_ids)
        for token in (*tokens, *(token for candidates in self.kept_tokens or () for token in candidates)):
            if type(token) is not int or not 0 <= token < vocabulary:
                raise ValueError(f"the token {token!r}, where the policy has {vocabulary}")
        for log_prob in self.log_probs:
            if type(log_prob) not in (int, float) or not -math.inf < log_prob < _ROUNDING:
                raise ValueError(f"the log-prob {log_prob!r}")
        if len(self.log_probs) != count:
            raise ValueError(f"{len(self.log_probs)} log-probs of {count} tokens")
        if count > request.max_tokens:
            raise ValueError(f"{count} tokens, where {request.max_tokens} were requested")
        if not stops.isdisjoint(tokens[:-1]):
            raise ValueError("tokens after one that ends the response")
        if self.is_complete and count < request.max_tokens and not stops.intersection(tokens[-1:]):
            raise ValueError(f"{count} tokens of {request.max_tokens}, and none of them ends the response")

    def with_experts(self, request: GenerateRequest, experts: NDArray[np.int16] | None) -> SampledRow:
        """Return the row with the experts that the server returned.

        Raises:
            ValueError: the number of tokens does not match.
        """
        tokens = len(request.prompt_ids) + len(self.token_ids) - 1
        if experts is not None and len(experts) != tokens:
            raise ValueError(f"its experts are of {len(experts)} tokens, not of {tokens}")
        return replace(self, experts=experts)


@dataclass(frozen=True)
class ServedPolicy:
    """The policy that a server has to run."""

    model_type: str
    """Model type in transformers."""
    vocabulary: int
    """Size of its vocabulary; a server's tokenizer is never used."""
    dtype: str | None = None
    """The dtype that the server has to compute in; None: any."""
    max_length: int = 0
    """Maximum length of prompt and response together."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of its layers, under their names in transformers."""


def check_formats(
    url: str, policy: ServedPolicy, *, dtype: str | None, max_length: int | None, options: tuple[str, str]
) -> None:
    """Check that a server computes in the dtype of the run and does not truncate responses.

    Args:
        url: address of the server.
        policy: the policy that it has to run.
        dtype: the dtype that it computes in; None: unknown.
        max_length: its limit on prompt and response together; None: unknown.
        options: its command-line options for these two.

    Raises:
        ValueError: it does not.
    """
    if dtype is not None and policy.dtype is not None and dtype != policy.dtype:
        key = "actor_rollout_ref.rollout.dtype"
        raise ValueError(
            f"{url}: computes in {dtype}; {key} is {policy.dtype}. "
            f"Start it with {options[0]} {policy.dtype}, or set {key}={dtype}"
        )
    if max_length is not None and max_length < policy.max_length:
        raise ValueError(
            f"{url}: supports {max_length} tokens of prompt and response; this run needs {policy.max_length} "
            "(actor_rollout_ref.rollout.prompt_length + response_length, or max_model_len). "
            f"Start it with {options[1]} {policy.max_length}, or lower these"
        )


def experts_missing(url: str, how: str) -> ValueError:
    """Return the error for a server that does not return the requested experts."""
    key = "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
    return ValueError(f"{url}: does not return the experts of tokens, which {key} requires. Start it with {how}")


class ServerApi(Protocol):
    """The API of one kind of server. Every method raises `ServerGone` and `ServerRefuses` as `Connections` does."""

    name: str
    """Its name in `actor_rollout_ref.rollout.name`."""
    title: str
    """Its name in messages."""
    how: str
    """A sentence with the command that starts such a server."""
    options: str
    """Its options that affect log-probs."""
    health_asleep: str
    """A cheap route that also works while the server sleeps."""

    def check(self, http: Connections, timeout: float) -> None:
        """Check that the server can be used, and prepare it.

        Raises:
            ValueError: it is of another kind or version, or runs another model.
        """
        ...

    def generate(self, http: Connections, request: GenerateRequest, timeout: float) -> SampledRow:
        """Generate a row. An incomplete response raises `ServerGone`."""
        ...

    def abort(self, http: Connections, timeout: float) -> None:
        """Abort all requests, each of which then returns the tokens that it has."""
        ...

    def weights_name(self, http: Connections, timeout: float) -> str | None:
        """Return the name of the loaded weights."""
        ...

    def load_weights(self, http: Connections, name: str, weights: WeightPayload, timeout: float) -> None:
        """Load new weights under this name."""
        ...

    def reset_prefix_cache(self, http: Connections, timeout: float) -> None:
        """Empty the prefix cache."""
        ...

    def progress_counter(self, http: Connections, timeout: float) -> float | None:
        """Return a number that changes as long as the server samples; None if there is none."""
        ...

    def sleep(self, http: Connections, timeout: float) -> None:
        """Release memory."""
        ...

    def wake(self, http: Connections, timeout: float) -> None:
        """Get ready to sample and to load weights again."""
        ...

    def recovery_actions(self) -> Mapping[str, Callable[[Connections, float], None]]:
        """Return the state of a server that may be stale, the most likely first, each with the request that renews
        it."""
        ...


@runtime_checkable
class SupportsLora(ServerApi, Protocol):
    """The API of a kind of server that supports adapters (LoRA), if it was started with support for them."""

    def load_adapters(self, http: Connections, name: str, adapters: dict[str, Tensor], timeout: float) -> None:
        """Replace the adapters; together with the base weights they have this name from now on.

        Args:
            http: connections to the server.
            name: name of the weights, including adapters.
            adapters: tensors on the host, under peft's names in a file.
            timeout: seconds for each request.
        """
        ...
