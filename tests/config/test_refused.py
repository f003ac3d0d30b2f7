"""What tether lacks is refused by name; a value that asks for nothing is accepted."""

import pytest

from tests.config.loading import BASE, load, problems_of
from tether.config import ConfigError, load_config
from tether.config.keys import keys, show, values_of
from tether.config.loading.given import Setting
from tether.config.support.patterns import look_up
from tether.config.support.refused import REFUSED, refusals

REFUSED_KEYS = [path for path in keys() if look_up(REFUSED, path) is not None]


def another_value(key):
    """A valid value that is neither the default nor otherwise harmless."""
    row = look_up(REFUSED, key.path)
    if row.values is not None:
        return row.values[0]
    if key.is_mapping:
        return "{a: 1}"
    if key.choices:
        return next(choice for choice in key.choices if choice not in (key.default, *row.fine))
    if key.inherits:
        # What it inherits from is set to another refused value in the same go.
        return {"a whole number": 9, "a whole number above 0": 9, "true or false": True}.get(key.type_text, "elsewhere")
    return {
        "true or false": key.default is False,
        "a whole number above 0": 7,
        "a whole number, 0 or above": 7,
        "a number above 0": 7.5,
        "a number from 0 to 1": 0.5,
        "a whole number": 7,
        "a whole number or null": 7,
        "a number": 7.5,
        "a number or null": 7.5,
        "a whole number above 0 or null": 7,
        "a list or null": "[7]",
    }.get(key.type_text, "other")


@pytest.fixture(scope="module")
def problems():
    overrides = [f"{path}={another_value(keys()[path])}" for path in REFUSED_KEYS]
    with pytest.raises(ConfigError) as error:
        load_config(None, [*BASE, *overrides])
    return {problem.path: problem for problem in error.value.problems if "is refused: " in problem.what}


@pytest.mark.parametrize("path", REFUSED_KEYS)
def test_refused_by_name_with_the_reason(problems, path):
    problem = problems[path]
    assert look_up(REFUSED, path).why in problem.what
    assert show(another_value(keys()[path])).split(":")[0].strip("[]{") in problem.what


def test_only_those_are_refused(problems):
    assert set(problems) == set(REFUSED_KEYS)


def test_their_defaults_are_accepted():
    rows = ((keys()[path], look_up(REFUSED, path)) for path in REFUSED_KEYS)
    plain = [key for key, _ in rows if key.inherits is None]
    load(*(f"{key.path}={show(key.default)}" for key in plain if key.default != ""))


def test_every_name_that_comes_later_is_refused():
    values = values_of(load().config)
    rows = [(path, name) for path, row in REFUSED.items() if path in keys() for name in row.values or ()]
    assert rows
    for path, name in rows:
        (problem,) = refusals({path: Setting(name, "command line", 1)}, values | {path: name})
        assert problem.path == path
        assert problem.what.startswith(f"{name} is refused: ")
        assert problem.fix.startswith("use one of ")
        assert name not in problem.fix.removeprefix("use one of ").split(", ")


def test_one_refused_name_in_a_list_is_enough():
    assert problems_of("trainer.logger=[console,swanlab]") == {
        "trainer.logger": "trainer.logger: [console,swanlab] is refused: this logger comes later. "
        "use one of console, file, tensorboard, wandb, mlflow"
    }


def test_an_unknown_name_is_told_only_those_that_work():
    (problem,) = problems_of("algorithm.adv_estimator=grop").values()
    assert problem.endswith(
        "optimal_token_baseline, gdpo, raw or a function of a file: FILE.py:NAME. did you mean grpo?"
    )


def test_one_machine_with_one_device_is_fine():
    config = load("trainer.nnodes=1", "trainer.n_gpus_per_node=1").config
    assert config.trainer.n_gpus_per_node == 1


def test_the_dapo_manager_is_the_naive_one_with_an_overlong_buffer():
    buffer = "reward_model.overlong_buffer"
    loaded = load("reward_model.reward_manager=dapo", f"{buffer}.enable=True", f"{buffer}.len=64", f"{buffer}.log=True")
    assert loaded.config.reward_model.overlong_buffer.len == 64
    assert loaded.notes == (f"no effect: {buffer}.log=True (the punishment is always logged)",)


def test_verls_copies_of_a_value_are_fine_when_they_agree():
    config = load("actor_rollout_ref.rollout.n=4", "critic.rollout_n=4").config
    assert config.critic.rollout_n == 4
    problems = problems_of("actor_rollout_ref.rollout.n=4", "critic.rollout_n=3")
    assert problems["critic.rollout_n"].endswith("leave it out, or set 4")
