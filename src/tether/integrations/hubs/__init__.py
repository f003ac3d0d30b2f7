"""The datasets of verl's scripts, downloaded from a hub and converted to the row layout: `tether data pull`.

Read in this order: `catalogue` (the datasets and the conversion of their rows; `problems` has programming problems),
`hub` (the protocol; `hugging_face`, `modelscope` and `local` implement it), `pull`. Only `pull` loads torch, so that a
configuration that names a known model (`registry_download`) is checked without it.
"""
