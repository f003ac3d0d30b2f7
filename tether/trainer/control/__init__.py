"""The training loop of control policies."""
