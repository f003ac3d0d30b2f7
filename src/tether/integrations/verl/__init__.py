"""verl's shell scripts as configurations: `recorder` runs a script in a sandbox, `command` writes its settings as YAML.

The keys need no importer: they are tether's.
"""
