"""Control policies: what acts in simulators."""
