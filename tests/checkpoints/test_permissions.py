"""Who may read a checkpoint: whoever the umask lets read new files, though safetensors writes for the owner alone."""

import os
import stat

import torch
from safetensors.torch import save_file

from tether.checkpoints import CheckpointStore


def test_weights_are_as_readable_as_other_files(tmp_path):
    before = os.umask(0o027)
    try:
        checkpoint = CheckpointStore(tmp_path).save(
            1, lambda folder: save_file({"a": torch.ones(2)}, folder / "model.safetensors")
        )
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in checkpoint.iterdir()}
    assert modes == {"model.safetensors": 0o640, "manifest.json": 0o640}
