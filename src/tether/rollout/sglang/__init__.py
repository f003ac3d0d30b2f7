"""The API of SGLang's servers, for `tether.rollout.servers`; `weights` has the ways of sending weights to one."""

from tether.rollout.sglang.api import SGLang, launch_of

__all__ = ["SGLang", "launch_of"]
