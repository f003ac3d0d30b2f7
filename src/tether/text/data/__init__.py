"""Prompts: rows from files, hubs and procedural tasks in one format, templated, and sampled in a resumable order.

Read in this order: `rows` (the format), `sources` (where rows come from), `prompts` (rows to token ids), `sampler`.
`location` resolves the source of rows without importing torch, so this package imports none of its modules.
"""
