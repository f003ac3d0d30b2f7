"""The commands of the page on simulators run, where the package behind the `#` is installed.

`scripts/test_simulators.sh` installs all of them.
"""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tether.commands.cli import app

PAGE = Path(__file__).parents[1] / "docs/guides/simulators.md"
TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    for line in block.replace("\\\n", "").splitlines()
]
SMALL = [
    "env.train.max_steps_per_rollout_epoch=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "trainer.total_training_steps=1", "trainer.total_env_steps=null", "trainer.test_freq=-1",
    "trainer.val_before_train=false", "trainer.default_local_dir=run", "trainer.logger=file",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.rpartition("# ")[2])
def test_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(command.rpartition("# ")[2], reason="bash scripts/test_simulators.sh installs it")
    monkeypatch.chdir(tmp_path)
    for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
        Path(name).write_text(code)
    done = CliRunner().invoke(app, [*shlex.split(command, comments=True)[1:], *SMALL])
    assert done.exit_code == 0, f"{done.output} {done.exception}"
    assert Path("run/global_step_1/actor/policy.json").is_file()
