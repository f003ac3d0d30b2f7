"""Loads files and command-line overrides into a typed configuration, and reports all problems at once.

The entry point is `load`; `compose` and `yaml_file` read files, `overrides` reads the command line, and `typos` and
`type_errors` describe what is wrong with a key or a value.
"""

__all__ = ["compose", "load", "overrides", "settings", "type_errors", "typos", "yaml_file"]
