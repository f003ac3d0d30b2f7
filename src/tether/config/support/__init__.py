"""Keys that have an effect, keys that are refused, and keys that are accepted without effect.

`live_keys` reads the marks of the schema, `verl_keys` the table of verl's keys that nothing here reads.
"""

__all__ = ["live_keys", "notes", "patterns", "refused", "verl_keys"]
