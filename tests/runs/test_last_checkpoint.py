"""A run that names no `trainer.save_freq` leaves a model behind, even where the disk is nearly full."""

import shlex
import shutil
from pathlib import Path

import pytest
import torch

import tether
from tests.runs.steps import built
from tests.runs.tiny_run import GRPO, LIGHT, same, weights
from tether.commands.report import next_commands
from tether.config import load_config
from tether.loop.loop import Schedule
from tether.loop.parts import Callbacks
from tether.loop.run import checkpoint_line, find_start


def test_the_last_step_is_saved_unless_nothing_is():
    saved = {freq: [step for step in range(1, 6) if Schedule(5, freq).saves_at(step)] for freq in (-1, 0, 2)}
    assert saved == {-1: [5], 0: [], 2: [2, 4, 5]}


def test_a_finished_run_has_a_model(base, tmp_path, capsys):
    one_step = [*GRPO, *LIGHT, "trainer.total_training_steps=1", "trainer.preflight=False"]
    defaults = [setting for setting in base if not setting.startswith("trainer.save_freq")]
    run = tether.train(overrides=[*defaults, *one_step])
    assert run.checkpoint == run.folder / "global_step_1"
    assert "checkpoints: about 0.0 GB, after the last step; " in capsys.readouterr().out
    assert len(run.model.generate(["2+2?"], max_new_tokens=2)) == 1
    none = tether.train(overrides=[*base, *one_step, f"trainer.default_local_dir={tmp_path / 'none'}"])
    with pytest.raises(ValueError, match="no checkpoint was saved"):
        none.model  # noqa: B018


def test_a_disk_without_room_for_a_checkpoint_is_named_before_the_run(base, tmp_path):
    config = {freq: load_config(None, [*base, f"trainer.save_freq={freq}"]).config for freq in (-1, 2)}
    folder = Path(config[-1].trainer.default_local_dir)
    folder.mkdir()

    def line(share: float, freq: int = -1) -> str:
        """Return the line for a model whose weights take this share of the free space, and its moments twice that."""
        model = torch.nn.Module()
        count = int(share * shutil.disk_usage(folder).free / 4)
        model.weight = torch.nn.Parameter(torch.empty(count, device="meta"))
        return checkpoint_line(config[freq], [model])[0]

    none = ", which is not enough: make room, or set trainer.save_freq=0 to save none"
    assert line(0.1).endswith(" GB are free")
    assert line(0.5).endswith(" GB), from which no run can resume: make room")
    assert ", enough for the weights alone (" in line(0.5)
    assert line(0.5, freq=2).endswith(none)
    assert line(1.5).endswith(none)


class FillsDisk:
    """Leaves some bytes of the disk after the second step."""

    def __init__(self, disk: Path, left: int) -> None:
        self.disk, self.left = disk, left

    def on_step_end(self, step: int, _: object) -> None:
        if step == 2:
            (self.disk / "filler").write_bytes(bytes(shutil.disk_usage(self.disk).free - self.left))


def test_the_weights_are_saved_where_the_rest_does_not_fit(base, small_disk, caplog):
    options = [*base, *GRPO, *LIGHT, f"trainer.default_local_dir={small_disk / 'my run'}"]
    options += ["trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1"]
    with built(options) as run:
        run.trainer.callbacks = Callbacks([FillsDisk(small_disk, 300_000)])
        run.trainer.fit()
        trained = {name: weight.clone() for name, weight in run.trainer.actor.engine.model.state_dict().items()}
    first, last = (small_disk / "my run" / f"global_step_{step}" for step in (1, 2))
    assert f"disk full while saving {last}: it needs" in caplog.text
    assert f"The weights alone fit: they are saved in {last}. No run can resume from them." in caplog.text
    assert same(weights(last), trained)
    assert not (last / "training").exists()
    assert len(tether.load(last.parent).generate(["2+2?"], max_new_tokens=2)) == 1
    checkpoint, ask = next_commands(last, "tether train")
    assert checkpoint.startswith(f"checkpoint  {last}   ")
    assert shlex.split(ask)[2:5] == ["tether", "generate", str(last)]
    assert "adapter" not in checkpoint
    (last / "adapter").mkdir()
    assert next_commands(last, "tether train")[0].endswith(
        f"(the policy: {last}/actor, merged; its adapter: {last}/adapter)"
    )
    (last / "adapter").rmdir()
    with pytest.raises(
        ValueError, match=f"{last}: has only weights.* 'trainer.resume_from_path={first}': resumes"
    ) as error:
        find_start(load_config(None, [*options, "trainer.total_training_steps=3"]))
    assert f"'actor_rollout_ref.model.path={last}' and another" in str(error.value)
    again = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={first}"]
    assert find_start(load_config(None, [*options, *again]))[1] == first
