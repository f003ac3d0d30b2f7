"""The one training loop of text and control, and what it knows of their parts (`protocol`); checkpoints of a run,
callbacks, evaluation, sampling ahead of the updates.
"""
