"""From files and command-line overrides to a typed configuration, with all problems reported at once.

`load` is the way in; `compose` and `yaml_file` read files, `overrides` the command line, `typos` and `type_errors` say
what is wrong with a key or a value.
"""

__all__ = ["compose", "given", "load", "overrides", "type_errors", "typos", "yaml_file"]
