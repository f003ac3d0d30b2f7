"""verl's shell scripts as configurations: `recorder` runs a script in a sandbox, `command` writes its settings as YAML.

The keys need no importer: they are tether's. `tether.config.loading.settings` reads verl's YAML files and overrides;
``config/support/verl_keys.toml`` has the keys that have another name here, or no effect.
"""
