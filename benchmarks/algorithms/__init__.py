"""Does every algorithm learn? A table of small tasks: see `benchmarks.algorithms.__main__`."""
