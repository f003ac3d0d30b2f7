"""Which keys act, which are refused, and which are accepted without effect.

`live_keys` answers from the marks of the schema, `verl_keys` from the table of verl's keys that nothing reads here.
"""

__all__ = ["live_keys", "notes", "patterns", "refused", "verl_keys"]
