"""Checks that compare several keys and refuse contradictions before a model is loaded.

`text` and `embodied` list the rules of the two kinds of run; most are rows of a table.
"""

__all__ = ["advantages", "text"]
