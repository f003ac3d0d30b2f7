"""Configuration files of other frameworks, rewritten in the keys of tether, one package per framework.

`rlinf` reads RLinf's YAML, `verl` the shell scripts that start verl; verl's YAML needs none: its keys are tether's.
"""

__all__ = ["rlinf", "verl"]
