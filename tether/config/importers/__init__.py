"""Configuration files of other frameworks, rewritten in the keys of tether, one package per framework.

`rlinf` reads RLinf's YAML. verl's files need no importer: their keys are tether's.
"""

__all__ = ["rlinf"]
