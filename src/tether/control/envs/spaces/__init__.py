"""Observation and action spaces: how a simulator's values become the arrays that policies read and write.

`observations` reads a Gymnasium space into named arrays, `actions` converts actions, and `action_masks` adds the mask
of
allowed actions. `action_bins` and `chain_actions` decode the output of a vision-language-action or flow-matching policy
to continuous actions, and `coded` makes environments accept that output.
"""
