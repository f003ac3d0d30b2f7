"""Rollouts: sampling from language models and playing in environments.

`protocol` defines the interface of an engine. `native` samples in the trainer's process and `servers` uses inference
servers with the API of `vllm` or `sglang`, which `parity` compares with the trainer. `turns` are conversations with
tools and environments; `env` plays episodes.
"""

from tether.rollout.concat import join_rollouts
from tether.rollout.protocol import FinishedResponse, NoiseKey, Responder, RolloutEngine, SamplingParams

__all__ = [
    "FinishedResponse",
    "NoiseKey",
    "Responder",
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
