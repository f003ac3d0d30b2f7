"""One module per simulator library, imported only when a configuration names it: each is an optional dependency.

A module makes single Gymnasium environments, or a batched simulator that implements `VectorEnv`.
"""
