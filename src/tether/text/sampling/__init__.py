"""The native engine, which samples in the trainer's process with the trainer's own modules.

Noise is keyed by prompt and position, so that a sample does not depend on its batch.
"""
