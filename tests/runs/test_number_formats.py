"""`dtype: auto` is decided by the device at the start of a run, and by the checkpoint when it resumes."""

from pathlib import Path

import pytest
import torch

from tests.runs.steps import built
from tests.runs.tiny_run import GAE, LIGHT
from tests.tiny import tiny_model
from tether.commands.train import train
from tether.config import changes_since, load_config, saved_values
from tether.text import roles
from tether.text.loading import DTYPE_KEYS, decided_formats, formats_line

AUTO = [f"{key}=auto" for key in DTYPE_KEYS]


@pytest.fixture
def device_has_bfloat16(monkeypatch: pytest.MonkeyPatch):
    """Sets what this machine seems to compute in."""
    return lambda has: monkeypatch.setattr("tether.text.loading.computes_in_bfloat16", lambda device: has)


def formats_in(run_yaml: Path) -> set[str]:
    values = saved_values(run_yaml)
    return {values[key] for key in DTYPE_KEYS}


@pytest.mark.parametrize(("has", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_the_device_decides(base: list[str], device_has_bfloat16, has: bool, expected: torch.dtype) -> None:
    device_has_bfloat16(has)
    with built([*base, *GAE, *LIGHT, *AUTO]) as run:
        assert {learner.engine.model.dtype for learner in (run.trainer.actor, run.trainer.critic)} == {expected}
        assert f"computes in {str(expected).removeprefix('torch.')}, as dtype is auto" in run.about


def test_what_is_set_stays(base: list[str], device_has_bfloat16) -> None:
    device_has_bfloat16(True)
    with built([*base, *GAE, *LIGHT, *(f"{key}=float32" for key in DTYPE_KEYS)]) as run:
        assert run.trainer.actor.engine.model.dtype == torch.float32
        assert not any("computes in" in line for line in run.about)


def test_the_line_names_those_that_were_left_open(base: list[str], device_has_bfloat16) -> None:
    """And none of a model that the run does not have, such as a reward model."""
    device_has_bfloat16(True)
    config = load_config(None, [*base, *AUTO, *(f"{key}=float32" for key in DTYPE_KEYS[:3])]).config
    assert formats_line(config, decided_formats(config, torch.device("cpu"))) == [
        "computes in bfloat16, as dtype of critic.model.fsdp_config is auto"
    ]
    config = load_config(None, [*base, *AUTO, *(f"{key}=float32" for key in DTYPE_KEYS[:4])]).config
    assert formats_line(config, decided_formats(config, torch.device("cpu"))) == []


def test_a_run_that_resumes_keeps_its_own(base: list[str], device_has_bfloat16, capsys: pytest.CaptureFixture) -> None:
    device_has_bfloat16(False)
    options = [*base, *GAE, *LIGHT, *AUTO, "trainer.save_freq=1", "trainer.preflight=False"]
    first = train(load_config(None, [*options, "trainer.total_training_steps=1"]))
    saved = first.folder / "global_step_1" / "run.yaml"
    assert formats_in(saved) == {"float32"}
    device_has_bfloat16(True)
    loaded = load_config(None, [*options, "trainer.total_training_steps=2"])
    assert any("dtype: float32 -> auto" in change for change in changes_since(saved, loaded))
    capsys.readouterr()
    train(loaded)
    assert "dtype" not in capsys.readouterr().out.replace("as dtype is auto", "")
    assert formats_in(first.folder / "global_step_2" / "run.yaml") == {"float32"}


def test_a_copy_that_samples_keeps_its_rotary_frequencies(base: list[str]) -> None:
    """Rounded to bfloat16 they would turn a token at position 1000 by other angles than the trainer's."""
    config = load_config(None, [*base, "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16"]).config
    policy = tiny_model("llama")
    copied = roles._copy_to_sample(config.actor_rollout_ref.actor.fsdp_config.dtype, policy)
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.bfloat16}
    frequencies, ours = copied.get_buffer("model.rotary_emb.inv_freq"), policy.get_buffer("model.rotary_emb.inv_freq")
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, ours)
    for name, weight in policy.named_parameters():
        assert torch.equal(copied.get_parameter(name), weight.bfloat16())
        assert copied.get_parameter(name).data_ptr() != weight.data_ptr()
