"""Advantages, losses and gradients of control policies, and the components of the training loop that are specific to
simulators.
"""
