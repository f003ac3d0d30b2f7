"""The checkpoint store: a checkpoint is complete or absent, hashed, and identified by its step.

`tether.loop.checkpoint` decides what a run's checkpoint contains and restores it, and `find_start` in
`tether.loop.run` chooses the one to resume from. Rank 0 of a run writes through `CheckpointStore`; use
`find_checkpoint` and `load_state` to read a folder.
"""

from tether.checkpoints.manifest import CARD, PARTIAL, sha256_of
from tether.checkpoints.ownership import read_own, write_own
from tether.checkpoints.rollbacks import Rollback, forget_other_rollbacks, roll_back, rollbacks_of
from tether.checkpoints.state import as_bytes, load_state, moments_path, save_moments, save_state
from tether.checkpoints.store import (
    BEST,
    CheckpointStore,
    DiskFull,
    find_checkpoint,
    is_checkpoint,
    is_disk_full,
    run_of,
    step_of,
)
from tether.checkpoints.trees import from_tree, to_tree

__all__ = [
    "BEST",
    "CARD",
    "PARTIAL",
    "CheckpointStore",
    "DiskFull",
    "Rollback",
    "as_bytes",
    "find_checkpoint",
    "forget_other_rollbacks",
    "from_tree",
    "is_checkpoint",
    "is_disk_full",
    "load_state",
    "moments_path",
    "read_own",
    "roll_back",
    "rollbacks_of",
    "run_of",
    "save_moments",
    "save_state",
    "sha256_of",
    "step_of",
    "to_tree",
    "write_own",
]
