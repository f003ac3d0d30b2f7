"""The one training loop of text and control, and the protocols that its parts implement (`protocol`); checkpoints of a
run, callbacks, evaluation, sampling ahead of the updates.
"""
