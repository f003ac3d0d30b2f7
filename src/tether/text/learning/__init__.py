"""Experience, losses and gradients of language models: micro-batches, packing, forward passes, and the components of
the training loop that are specific to text.
"""
