"""The language of SGLang's servers; see `tether.rollout.servers`. `weights` has the ways in which weights reach one."""

from tether.rollout.sglang.dialect import SGLang, launch_of

__all__ = ["SGLang", "launch_of"]
