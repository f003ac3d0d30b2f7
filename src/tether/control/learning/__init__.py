"""Advantages, losses and gradients of control policies, and the parts of the training loop that only simulators
have.
"""
