"""The language of vLLM's servers; see `tether.rollout.servers`. What runs inside of them is in the folder `inside`,
which is not imported here.
"""

from tether.rollout.vllm.dialect import Adapters, Vllm, launch_of

__all__ = ["Adapters", "Vllm", "launch_of"]
