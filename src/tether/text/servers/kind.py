"""What a run needs to start a kind of server and to send it requests. `vllm_kind` has vLLM's; an integration has its
own in its module ``kind``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

from tether.config import ActorRolloutRefConfig
from tether.text.servers import Launch, ServedPolicy, ServerApi


@dataclass(frozen=True)
class ServerStart:
    """Choices of a run for a server that it starts."""

    folder: str
    """Folder of the policy's config, and of its weights unless the load format is dummy."""
    load_format: str
    """Format of the weights; dummy: random ones, until the server receives the policy's."""
    max_length: int
    """Maximum number of tokens of prompt and response together."""
    on_gpu: bool


@dataclass(frozen=True)
class ServerKind:
    """A kind of server."""

    api: Callable[[ActorRolloutRefConfig, PreTrainedConfig, ServedPolicy], ServerApi]
    """Returns the client: (section of the policy, its config, what a server has to run) -> API."""
    launch_of: Callable[[Path, Path, Mapping[str, object], Mapping[str, str]], Launch]
    """Returns the settings for launching a server: (interpreter, log, options, environment) -> launch."""
    options: Callable[[ActorRolloutRefConfig, ServerStart], dict[str, object]]
    """Returns the options of its command line."""
    cpu_environment: Callable[[int], dict[str, str]]
    """Returns the environment variables of a server that computes on a CPU: tensor-parallel ranks -> environment."""
    sends_adapters: Callable[[ActorRolloutRefConfig], bool]
    """Returns whether LoRA adapters are sent instead of merged weights."""
