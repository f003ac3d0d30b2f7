"""Stepping many environments together: in this process, in subprocesses, or by a batched simulator.

All implement `VectorEnv`. `loop` is the reference: `subprocesses` and `gymnasium_vector` must give the same results.
"""
