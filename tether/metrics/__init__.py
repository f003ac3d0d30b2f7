"""What a run measures, and where the numbers go.

`keys` explains every metric; `data`, `perf`, `timing` and `validation` compute them; `loggers` writes them; `plot`
draws them. Importing this package loads no logging library: each adapter is imported when it is asked for.
"""
