"""Micro-batches, packing and losses of language models."""
