"""Many environments stepped together: in this process, in subprocesses, or by a batched simulator.

All are `VectorEnv`s. `loop` is the reference that `subprocesses` and the vector environments of Gymnasium must match.
"""

__all__ = [
    "action_repeat",
    "answers",
    "batched_simulation",
    "episode_starts",
    "gymnasium_vector",
    "loop",
    "subprocesses",
    "timed",
]
