"""Observation and action spaces: how a simulator's values become the arrays that policies read and write.

`observations` reads a Gymnasium space into a typed tree, `actions` translates and scales actions, `action_masks` shows
which choices are allowed, and `action_bins` turns the bins of a vision-language-action policy into continuous actions.
"""

__all__ = ["action_bins", "action_masks", "actions", "observations"]
