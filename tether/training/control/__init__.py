"""Updates of control policies."""
