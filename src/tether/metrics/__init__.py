"""Metrics of a run, and the loggers that write them.

`keys` explains every metric; `data`, `timing` and `validation` compute them; `loggers` writes them; `records` keeps
samples and episodes of training; `plot` draws curves. Some of these modules import torch, which commands that only read
a log do not need, so import single modules.
"""

__all__ = ["data", "keys", "loggers", "names", "plot", "records", "timing", "validation"]
