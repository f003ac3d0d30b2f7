"""Rollouts: sampling from language models and playing in environments.

`protocol` has the interface of an engine. `native` samples in the trainer's process, `servers` by servers
that speak the language of `vllm` or `sglang`, which `parity` compares with the trainer; `turns` are conversations with
tools and environments; `env` plays episodes.
"""

from tether.rollout.concat import join_rollouts
from tether.rollout.protocol import FinishedResponse, NoiseKey, Partner, RolloutEngine, SamplingParams

__all__ = [
    "FinishedResponse",
    "NoiseKey",
    "Partner",
    "RolloutEngine",
    "SamplingParams",
    "env",
    "join_rollouts",
    "native",
    "parity",
    "servers",
    "sglang",
    "turns",
    "vllm",
]
