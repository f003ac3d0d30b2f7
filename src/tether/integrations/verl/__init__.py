"""Converts verl's shell scripts: `recorder` runs a script in a sandbox, and `command` writes its settings as YAML.

Keys need no translation, because tether uses verl's. `tether.config.loading.settings` reads verl's YAML files and
overrides; ``config/support/verl_keys.toml`` lists the keys with a different name here, or without effect.
"""
