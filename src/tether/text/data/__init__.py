"""Prompts: rows from files, hubs and procedural tasks in one layout, templated, and sampled in a resumable order.

Read in this order: `rows` (the layout), `sources` (where rows come from), `prompts` (rows to token ids), `sampler`.
`location` finds the source of rows without loading torch, so import the module that you need.
"""
