"""verl's shell scripts as configurations: `shell` reads what a script would run, `command` writes its settings as YAML.

The keys need no importer: they are tether's.
"""
