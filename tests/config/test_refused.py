"""A missing feature is refused by name; a value that asks for nothing is accepted."""

import json

import pytest

from tests.config.loading import BASE, load, problems_of
from tether.config import ConfigError, load_config
from tether.config.keys import keys, values_of
from tether.config.loading.settings import Setting
from tether.config.support.refused import refusals
from tether.config.support.verl_keys import unread_keys


def test_refused_by_name_with_value_reason_and_fix():
    refused = [path for path, row in unread_keys().items() if row.refused]
    assert len(refused) > 100
    acting = [
        "actor_rollout_ref.model.lora_rank=8",
        "distillation.enabled=True",
        "distillation.teacher_models.teacher_model.model_path=x",
    ]
    with pytest.raises(ConfigError) as error:
        load_config(None, [*BASE, *acting, *(f"+{path}=elsewhere" for path in refused)])
    problems = {problem.path: problem for problem in error.value.problems}
    assert {path: problems[path].what for path in refused} == {
        path: f"elsewhere is refused: {unread_keys()[path].why}" for path in refused
    }
    assert [path for path in refused if not problems[path].fix.startswith("leave it out, or set ")] == []


def test_values_that_ask_for_nothing_are_accepted():
    plain = {path: row.fine[0] for path, row in unread_keys().items() if row.refused and row.fine}
    load(*(f"+{path}={value if isinstance(value, bool) else json.dumps(value)}" for path, value in plain.items()))


def test_every_name_that_comes_later_is_refused():
    values = values_of(load().config)
    rows = [(key, name) for key in keys().values() if key.refuses for name in key.refuses.choices]
    assert len(rows) > 5
    for key, name in rows:
        (problem,) = refusals({key.path: Setting(name, "command line", 1)}, values | {key.path: name})
        assert str(problem).startswith(f"{key.path}: {name} is refused: {key.refuses.why}. use one of ")
        assert name not in problem.fix.removeprefix("use one of ").split(", ")


def test_one_refused_name_in_a_list_is_enough():
    assert problems_of("trainer.logger=[console,clearml]") == {
        "trainer.logger": "trainer.logger: [console,clearml] is refused: this logger comes later. "
        "use one of console, file, tensorboard, wandb, mlflow, trackio, swanlab"
    }


def test_an_unknown_name_is_told_only_those_that_work():
    (problem,) = problems_of("algorithm.adv_estimator=grop").values()
    assert problem.endswith(
        "optimal_token_baseline, gdpo, raw or a function of a file: FILE.py:NAME. did you mean grpo?"
    )


def test_one_machine_with_one_device_is_fine():
    assert load("trainer.nnodes=1", "trainer.n_gpus_per_node=1").notes == ()


def test_the_dapo_manager_is_the_naive_one_with_an_overlong_buffer():
    buffer = "reward_model.overlong_buffer"
    loaded = load("reward_model.reward_manager=dapo", f"{buffer}.enable=True", f"{buffer}.len=64", f"{buffer}.log=True")
    assert loaded.config.reward_model.overlong_buffer.len == 64
    assert loaded.notes == (f"no effect: {buffer}.log=True (the punishment is always logged)",)


def test_dapos_arguments_of_the_manager_are_the_overlong_buffer():
    given = "reward_model.reward_kwargs"
    buffer = [f"{given}.overlong_buffer_cfg.enable=True", f"{given}.overlong_buffer_cfg.len=64"]
    loaded = load("data.max_response_length=256", *buffer, f"{given}.max_resp_len=256")
    found = loaded.config.reward_model.overlong_buffer
    assert (found.enable, found.len) == (True, 64)
    shorter = problems_of("data.max_response_length=256", *buffer, f"{given}.max_resp_len=128")
    assert "the limit of responses is data.max_response_length" in shorter.popitem()[1]
    assert "custom_reward_function.reward_kwargs" in problems_of(f"{given}.bonus=1")[f"{given}.bonus"]


def test_a_batch_is_scored_by_a_function_alone():
    batch, function = "reward_model.reward_manager=batch", "custom_reward_function.path=mine.py"
    assert load(batch, function).config.reward_model.reward_manager == "batch"
    assert "needs custom_reward_function.path" in problems_of(batch)["reward_model.reward_manager"]
    parts = "reward_model.parts={rule: {kind: rules}}"
    assert "not by reward_model.parts" in problems_of(batch, function, parts)["reward_model.reward_manager"]


def test_verls_copies_of_a_value_are_fine_when_they_agree():
    load("actor_rollout_ref.rollout.n=4", "critic.rollout_n=4")
    problems = problems_of("actor_rollout_ref.rollout.n=4", "critic.rollout_n=3")
    assert problems["critic.rollout_n"].endswith("leave it out, or set 4")
