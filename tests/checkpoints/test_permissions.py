"""Who may read a checkpoint or a model: whoever the umask lets read new files. Others hear of permissions."""

import os
import stat
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import save_file

from tests.forks import forking
from tether.checkpoints import CheckpointStore, find_checkpoint
from tether.text.models.model_path import resolve_model_path

NOBODY = 65534


def save(root: Path) -> Path:
    def write(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor/config.json").write_text("{}")
        save_file({"a": torch.ones(2)}, folder / "actor/model.safetensors")

    return CheckpointStore(root).save(1, write)


def test_weights_are_as_readable_as_other_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        checkpoint = save(tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in checkpoint.rglob("*.*")}
    assert modes == dict.fromkeys(("config.json", "model.safetensors", "manifest.json"), 0o640)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that another user reaches, which those of pytest are not."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def _answer(read: Callable[[Path], object], path: Path, answers: Connection) -> None:
    if os.geteuid() == 0:  # whom no permission stops
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    try:
        answers.send(f"read {read(path)}")
    except ValueError as error:
        answers.send(f"{type(error).__name__}: {error}")


def as_another_user(read: Callable[[Path], object], path: Path) -> str:
    """Call a function in a process of another user, or at least of one whom permissions stop."""
    ours, theirs = forking().Pipe()
    process = forking().Process(target=_answer, args=(read, path, theirs))
    process.start()
    answer = ours.recv()
    process.join()
    return str(answer)


def _model(folder: Path) -> object:
    return resolve_model_path(folder, folder)


def test_another_user_hears_of_permissions_and_not_of_damage(shared: Path) -> None:
    checkpoint = save(shared / "run")
    model, weights, manifest = (
        checkpoint / "actor",
        checkpoint / "actor/model.safetensors",
        checkpoint / "manifest.json",
    )
    assert as_another_user(find_checkpoint, shared / "run") == f"read {checkpoint}"
    assert as_another_user(_model, model) == f"read {model}"
    for private, readers in ((weights, (find_checkpoint, _model)), (model, (_model,)), (manifest, (find_checkpoint,))):
        before = stat.S_IMODE(private.stat().st_mode)
        private.chmod(0o000)
        says = f"ValueError: {private}: you have no permission to read it. Whoever it belongs to can give it, by chmod"
        for read in readers:
            assert as_another_user(read, shared / "run" if read is find_checkpoint else model).startswith(says)
        private.chmod(before)
