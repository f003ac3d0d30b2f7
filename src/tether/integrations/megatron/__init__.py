"""Models that Megatron-core shards by tensor, pipeline, expert and context parallelism, in transformers' file format.

Only `layout` and `version` can be imported without Megatron (the extra megatron). A process calls `groups.start` once,
then `model.build` for each model; `MegatronModel` documents how a training engine uses it.
"""

from tether.integrations.megatron.layout import MegatronLayout, check

__all__ = ["MegatronLayout", "check"]
