"""Models that Megatron-core holds in tensor, pipeline, expert and context parallel parts, from and to transformers.

Only `layout` and `version` load without Megatron (``pip install "tether[megatron]"``). A process calls `groups.start`
once, then `model.build` for each model; `MegatronModel` says what a training engine does with it.
"""

from tether.models.megatron.layout import Layout, check

__all__ = ["Layout", "check", "cpu", "dist_checkpoint", "families", "groups", "head", "layout", "model", "version"]
