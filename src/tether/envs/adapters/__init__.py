"""One module per simulator library, imported only when a configuration names it: each is an optional dependency.

A module makes Gymnasium environments, or a batched simulator that is a `VectorEnv` by itself.
"""

__all__ = ["envpool", "libero", "maniskill", "metaworld", "minigrid"]
