"""Sampling with inference servers over HTTP: token ids in, token ids and log-probs out, new weights after each update.

`engine` samples with servers, `server` starts and supervises one on this machine, `hosted` one on the node of a rank.
`api` is the interface to a server's HTTP routes, and `kind` describes how a run starts a server; `vllm_api`,
`vllm_kind` and `tether.integrations.sglang` implement them.
"""

from tether.text.servers.api import (
    GenerateRequest,
    Launch,
    SampledRow,
    ServedPolicy,
    ServerApi,
    check_formats,
    experts_missing,
)
from tether.text.servers.broadcast import BroadcastGroup, is_local
from tether.text.servers.engine import ServedEngine
from tether.text.servers.http import Connections, ServerGone, ServerRefuses
from tether.text.servers.protocol import SamplingServer, Traffic
from tether.text.servers.server import InferenceServer
from tether.text.servers.transfer import CPU, WeightPayload, gpu_of, shared_file, this_gpu

__all__ = [
    "CPU",
    "BroadcastGroup",
    "Connections",
    "GenerateRequest",
    "InferenceServer",
    "Launch",
    "SampledRow",
    "SamplingServer",
    "ServedEngine",
    "ServedPolicy",
    "ServerApi",
    "ServerGone",
    "ServerRefuses",
    "Traffic",
    "WeightPayload",
    "check_formats",
    "experts_missing",
    "gpu_of",
    "is_local",
    "shared_file",
    "this_gpu",
]
