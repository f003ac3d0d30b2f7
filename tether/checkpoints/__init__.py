"""The checkpoint store: a checkpoint is complete or absent, hashed, and found by its step.

Rank 0 of a run writes through `CheckpointStore`; whoever reads a folder asks `find_checkpoint` and `load_state`.
"""

from tether.checkpoints.manifest import PARTIAL, sha256_of
from tether.checkpoints.store import BEST, CheckpointStore, find_checkpoint, load_state, save_state, step_of

__all__ = ["BEST", "PARTIAL", "CheckpointStore", "find_checkpoint", "load_state", "save_state", "sha256_of", "step_of"]
