"""Metrics of a run, and the loggers that write them.

`keys` explains every metric; `data`, `perf`, `timing` and `validation` compute them; `loggers` writes them; `plot`
draws them. Some of these need torch, and commands that only read a log do not: import the module.
"""

__all__ = ["data", "keys", "loggers", "perf", "plot", "timing", "validation"]
