"""Metrics of a run, and the loggers that write them.

`keys` explains every metric; `data`, `timing` and `validation` compute them; `loggers` writes them; `plot`
draws them. Some of these modules need torch and commands that only read a log do not, so import the module that you
need.
"""

__all__ = ["data", "keys", "loggers", "plot", "timing", "validation"]
