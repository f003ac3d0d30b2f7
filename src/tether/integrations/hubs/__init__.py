"""The datasets of verl's scripts, downloaded from a hub and converted to the row layout: `tether data pull`.

Reading order: `catalogue` (the datasets and the conversion of their rows; `problems` has programming problems), `hub`
(the protocol, which `hugging_face`, `modelscope_data` and `local` implement), `pull`. Only `pull` imports torch, so
that a configuration that names a known model (`registry_download`) is checked without it.
"""
