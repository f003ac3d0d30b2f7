"""The API of SGLang's servers, for `tether.text.servers`; `weights` implements the transfer of weights."""

from tether.integrations.sglang.api import SGLang, launch_of

__all__ = ["SGLang", "launch_of"]
