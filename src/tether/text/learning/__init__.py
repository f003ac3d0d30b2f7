"""Experience, losses and gradients of language models: micro-batches, packing, forward passes, and the steps of the
loop that only text has.
"""
