"""Sampling by vLLM servers over HTTP: token ids in, token ids and their log-probs out, new weights after each update.

`server` starts them and speaks with them, `engine` samples with them; what runs inside of them is in the folder
`inside`, which is not imported here.
"""

from tether.rollout.vllm.engine import Traffic, VllmEngine
from tether.rollout.vllm.server import Launch, Server, launch_of

__all__ = ["Launch", "Server", "Traffic", "VllmEngine", "launch_of"]
