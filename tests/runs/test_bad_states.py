"""Training states of another shape, with a manifest that was mended, are refused by file."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from tests.runs.golden import Golden
from tether.checkpoints import load_state, save_state
from tether.config import load_config
from tether.loop.run import find_start

OTHERS = (None, "text", -1, [1], {"x": 1}, torch.ones(3))


def test_a_resume_with_settings_of_other_models_is_refused(golden: Golden) -> None:
    """What acts when models are built would be announced as changed, and do nothing."""
    other = {"Text": "actor_rollout_ref.model.lora_rank=4", "Control": "policy.hidden_dim=8"}[
        type(golden.loop).__name__
    ]
    find_start(load_config(None, golden.overrides(golden.folder)))
    with pytest.raises(ValueError, match=f"{other.partition('=')[0]}: .* -> .* cannot change"):
        find_start(load_config(None, golden.overrides(golden.folder, other)))


def wrong_states(file: Path, sparsely: int) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    """Contents of a file that are not what was saved there, by what was done; each key has one in `sparsely` of
    `OTHERS`.
    """
    yield "empty", b""
    yield "cut", file.read_bytes()[:100]
    yield "pickle", pickle.dumps({"step": 3})
    state = load_state(file)
    yield "nothing", {}
    for i, key in enumerate(state):
        if i % sparsely == 0:
            yield f"no {key}", {name: value for name, value in state.items() if name != key}
        for other in OTHERS[i % sparsely :: sparsely]:
            yield f"{key}={other}", state | {key: other}


@pytest.mark.parametrize("sparsely", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_state_of_another_shape_is_refused_by_file(sparsely: int, golden: Golden, tmp_path: Path) -> None:
    checkpoint = tmp_path / "global_step_2"
    copytree(golden.folder / checkpoint.name, checkpoint)
    run = golden.loop.build(golden.overrides(tmp_path / "run"))
    faults, refused = [], 0
    try:
        for file in sorted((checkpoint / "training").glob("*.pt")):
            good = file.read_bytes()
            for what, state in wrong_states(file, sparsely):
                if isinstance(state, bytes):
                    file.write_bytes(state)
                else:
                    save_state(file, state)
                try:
                    run.trainer.resume(checkpoint)
                except ValueError as error:
                    refused += 1
                    if not str(error).startswith(f"{file}: "):
                        faults.append((what, str(error)))
                except Exception as error:  # noqa: BLE001
                    faults.append((f"{file.name} {what}", repr(error)))
                else:
                    if what in ("empty", "cut", "pickle", "nothing"):
                        faults.append((f"{file.name} {what}", "taken"))
                file.write_bytes(good)
        run.trainer.resume(copytree(golden.folder / checkpoint.name, tmp_path / "global_step_3"))
    finally:
        run.close()
    assert faults == []
    assert refused > 50 / sparsely
