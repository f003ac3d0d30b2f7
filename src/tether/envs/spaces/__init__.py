"""Observation and action spaces: how a simulator's values become the arrays that policies read and write.

`observations` reads a Gymnasium space into a typed tree, `actions` translates and scales actions, `action_masks` shows
which choices are allowed. `action_bins` and `chain_actions` turn what a vision-language-action or flow-matching policy
gives into continuous actions, and `coded` makes environments take it.
"""

__all__ = ["action_bins", "action_masks", "actions", "chain_actions", "coded", "observations"]
