"""Optional packages that a configuration asks for are looked for before a run begins, also by `config check`."""

import pytest

from tether.config import load_config
from tether.text import input_checks

CONTROL = ["env.train.id=CartPole-v1", "trainer.device=cpu", "trainer.default_local_dir=run"]


@pytest.mark.parametrize(
    ("override", "package", "extra"),
    [
        ("trainer.logger=[console,tensorboard]", "tensorboard", "tensorboard"),
        ("trainer.logger=wandb", "wandb", "wandb"),
        ("trainer.logger=mlflow", "mlflow", "mlflow"),
        ("trainer.logger=trackio", "trackio", "trackio"),
        ("trainer.n_gpus_per_node=2", "ray", "ray"),
        ("env.train.env_type=envpool", "envpool", "envpool"),
        ("env.train.env_type=maniskill", "mani_skill", "maniskill"),
        ("trainer.total_epochs=1", "gymnasium", "gymnasium"),
    ],
)
def test_a_package_that_is_missing_is_one_problem(
    override: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(None, [*CONTROL, override]).config
    monkeypatch.setattr(input_checks, "find_spec", lambda name: None if name == package else object())
    (problem,) = input_checks.missing_inputs(config)
    assert problem.path == {"gymnasium": "env.train.id"}.get(package, override.partition("=")[0])
    assert f"[{extra}]'" in problem.what
    monkeypatch.setattr(input_checks, "find_spec", lambda name: object())
    assert input_checks.missing_inputs(config) == []


def test_adapters_need_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        None, ["data.train_files=rows", "actor_rollout_ref.model.path=model", "critic.model.lora_rank=4"]
    ).config
    key = "critic.model.lora_rank"
    for installed in (True, False):
        monkeypatch.setattr(input_checks, "find_spec", lambda _, found=installed: object() if found else None)
        missing = [problem.what for problem in input_checks.missing_inputs(config) if problem.path == key]
        assert ["[lora]'" in what for what in missing] == [True] * (not installed)
