"""The API of vLLM's servers, for `tether.rollout.servers`. The folder `inside` has the code that runs inside of them,
which is not imported here.
"""

from tether.rollout.vllm.api import Adapters, Vllm, launch_of

__all__ = ["Adapters", "Vllm", "launch_of"]
