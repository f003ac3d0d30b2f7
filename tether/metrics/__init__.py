"""Metrics of a run, and the loggers that write them.

`keys` explains every metric; `data`, `perf`, `timing` and `validation` compute them; `loggers` writes them; `plot`
draws them. Importing this package loads no logging library: each adapter is imported when it is asked for.
"""
