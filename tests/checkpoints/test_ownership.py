"""A pickle is loaded from where nobody but this user could have put it."""

import os
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tether.checkpoints import read_own, write_own


@pytest.fixture
def everybody_writes():
    before = os.umask(0)
    yield
    os.umask(before)


def test_what_this_user_wrote_is_read_whatever_the_umask(tmp_path: Path, everybody_writes: None) -> None:
    folder = tmp_path / "global_step_1"
    folder.mkdir()
    file = folder / "state.pkl"
    write_own(file, b"content")
    assert read_own(file, "") == b"content"
    assert [oct(path.stat().st_mode & 0o777) for path in (folder, file)] == ["0o755", "0o644"]


def test_what_others_could_have_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "state.pkl"
    write_own(file, b"content")
    for path, mode in ((file, 0o664), (file, 0o646), (tmp_path, 0o775), (tmp_path, 0o757)):
        before = path.stat().st_mode
        path.chmod(mode)
        says = f"^{re.escape(str(file))}: loading it can run code, and {re.escape(str(path))} can be written by .*Fix"
        with pytest.raises(ValueError, match=says):
            read_own(file, "Fix")
        path.chmod(before)
    theirs = Path("/etc/hostname")  # belongs to root
    if os.geteuid() == 0:
        theirs = file
        os.chown(file, 65534, -1)
    link = tmp_path / "link.pkl"
    link.symlink_to(theirs)
    for path in (theirs, link):
        with pytest.raises(ValueError, match=r"can run code, and .* belongs to \w+, not to "):
            read_own(path, "")


class Runs:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_the_state_of_environments_runs_no_code_of_others_unless_a_key_says_so(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    from tether.trainer.control.rollouts import ENVIRONMENTS, EnvRollouts

    collector = SimpleNamespace(env=None)
    rollouts = EnvRollouts(
        policy=cast(Any, None), collector=cast(Any, collector), evaluation=None, seed=1, env_seed=1, warn=print
    )
    mark = tmp_path / "ran"
    file = tmp_path / ENVIRONMENTS
    file.write_bytes(pickle.dumps({"other": Runs(mark)}))
    file.chmod(0o666)
    with pytest.raises(ValueError, match=r"environments\.pkl.* trainer\.trust_checkpoint_pickle=True"):
        rollouts.load_checkpoint(tmp_path)
    assert not mark.exists()
    rollouts.trust_pickles = True
    rollouts.load_checkpoint(tmp_path)
    assert mark.exists()
    mark.rmdir()
    file.chmod(0o644)
    rollouts.trust_pickles = False
    rollouts.load_checkpoint(tmp_path)
    assert mark.exists()
