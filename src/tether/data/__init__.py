"""Prompts: rows of files, hubs and procedural tasks in one layout, templated, and dealt out in a resumable order.

Read in this order: `rows` (the layout), `sources` (where rows come from), `prompts` (rows to token ids), `sampler`.
`published` makes files of hubs' datasets. `location` finds out where rows would come from without loading torch: import
the module that you need.
"""

__all__ = [
    "chat",
    "checks",
    "columns",
    "control_tokens",
    "custom",
    "demonstrations",
    "lerobot",
    "location",
    "pairs",
    "prompts",
    "published",
    "rows",
    "sampler",
    "sources",
]
