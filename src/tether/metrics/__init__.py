"""Metrics of a run, and the loggers that write them.

`keys` explains every metric; `data`, `timing` and `validation` compute them; `loggers` writes them; `records` keeps
samples and episodes of training; `plot` draws curves. Some of these modules need torch and commands that only read a
log do not, so import the module that you need.
"""

__all__ = ["data", "keys", "loggers", "names", "plot", "records", "timing", "validation"]
