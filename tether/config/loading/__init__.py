"""From files and command-line overrides to a typed configuration, with every problem reported at once."""
