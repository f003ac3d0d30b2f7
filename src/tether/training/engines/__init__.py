"""Engines that own a model and its optimizer and run forward and backward passes, and the incidents that they record.

`local`, `one_rank` and `fsdp` are for language models, `flat` for control policies: import the module that you need,
since only some of them load transformers.
"""

__all__ = ["autograd", "copies", "flat", "flat_ranks", "fsdp", "local", "one_rank", "optimizer", "shares"]
