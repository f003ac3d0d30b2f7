"""The checkpoint store: a checkpoint is complete or absent, hashed, and found by its step.

Rank 0 of a run writes through `CheckpointStore`; whoever reads a folder asks `find_checkpoint` and `load_state`.
"""

from tether.checkpoints.manifest import CARD, PARTIAL, sha256_of
from tether.checkpoints.rollbacks import Rollback, forget_other_rollbacks, roll_back, rollbacks_of
from tether.checkpoints.state import as_bytes, load_state, moments_beside, save_moments, save_state
from tether.checkpoints.store import BEST, CheckpointStore, find_checkpoint, run_of, step_of
from tether.checkpoints.trees import from_tree, to_tree

__all__ = [
    "BEST",
    "CARD",
    "PARTIAL",
    "CheckpointStore",
    "Rollback",
    "as_bytes",
    "find_checkpoint",
    "forget_other_rollbacks",
    "from_tree",
    "load_state",
    "moments_beside",
    "roll_back",
    "rollbacks_of",
    "run_of",
    "save_moments",
    "save_state",
    "sha256_of",
    "step_of",
    "to_tree",
]
