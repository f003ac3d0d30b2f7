"""The API of SGLang's servers, for `tether.text.servers`; `weights` has the ways of sending weights to one."""

from tether.integrations.sglang.api import SGLang, launch_of

__all__ = ["SGLang", "launch_of"]
