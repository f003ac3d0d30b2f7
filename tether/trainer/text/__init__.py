"""The training loop of language models."""
