"""Sampling by inference servers over HTTP: token ids in, token ids and log-probs out, new weights after each update.

`engine` samples with servers, `server` starts one and keeps it going, `dialect` is what differs from one kind of server
to another: `tether.rollout.vllm` and `tether.rollout.sglang` each have one.
"""

from tether.rollout.servers.broadcast import BroadcastGroup, is_here
from tether.rollout.servers.dialect import Dialect, Draw, Launch, Policy, Sampled, check_formats, experts_missing
from tether.rollout.servers.engine import ServedEngine, Traffic
from tether.rollout.servers.http import Connections, ServerGone, ServerRefuses
from tether.rollout.servers.server import Server
from tether.rollout.servers.transfer import CPU, Outgoing, gpu_of, shared_file, this_gpu

__all__ = [
    "CPU",
    "BroadcastGroup",
    "Connections",
    "Dialect",
    "Draw",
    "Launch",
    "Outgoing",
    "Policy",
    "Sampled",
    "ServedEngine",
    "Server",
    "ServerGone",
    "ServerRefuses",
    "Traffic",
    "check_formats",
    "experts_missing",
    "gpu_of",
    "is_here",
    "shared_file",
    "this_gpu",
]
