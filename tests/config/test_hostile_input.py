"""Input that nobody means: every file and every override loads or is refused by name, and none hangs or fails."""

import contextlib

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.config.loading import BASE, load, problems_of
from tether.config import ConfigError, load_config
from tether.config.keys import keys
from tether.config.loading import yaml_file
from tether.config.loading.overrides import Override
from tether.config.render import Dumper
from tether.config.support.verl_keys import unread_keys

NAMES = sorted(
    {*keys(), *list(unread_keys())[::20], "data", "actor_rollout_ref.actor.megatron", "nope", "a.b", "hydra"}
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.dates(),
    st.sampled_from(["${trainer.seed}", "${nope}", "${", "???", "${oc.env:NOPE}", "${data}", "x,y", "[1", "1e5"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS.filter(lambda v: v == v), inner, max_size=3),
    max_leaves=6,
)
BETAS = "actor_rollout_ref.actor.optim.betas"


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
@example({"actor_rollout_ref.actor.ppo_micro_batch_size": "x"})
@example({"trainer.seed": {None: 2}})
@example({"reward_model.num_workers": None})
def test_any_file_loads_or_is_refused(tmp_path_factory, tree):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    with contextlib.suppress(ConfigError):
        load_config(path, BASE)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            "{}{}{}{}".format,
            st.sampled_from(["", "+", "++", "~"]),
            st.sampled_from(NAMES),
            st.sampled_from(["=", "", ".x=", "@a="]),
            st.one_of(st.text(max_size=6), st.sampled_from(["{null:2}", "[", "${trainer.seed}", "{a:{b:1}}", "1,2"])),
        ),
        max_size=4,
    )
)
@example(["actor_rollout_ref.actor.checkpoint.save_contents=x", "actor_rollout_ref.actor.checkpoint.save_contents.a=2"])
@example(["actor_rollout_ref.actor.checkpoint.save_contents.a=2", "actor_rollout_ref.actor.checkpoint.save_contents=x"])
@example(["data.apply_chat_template_kwargs.x={null:2}"])
@example(["env.train.id="])
@example(["env.train.id=[1]"])
def test_any_override_loads_or_is_refused(overrides):
    with contextlib.suppress(ConfigError):
        load_config(None, [*BASE, *overrides])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("data: &a {x: *a}", "contain themselves"),
        ("data: " + "{a: " * 3000 + "1" + "}" * 3000, "nested too deeply"),
        ("data: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)), "100000"),
    ],
)
def test_a_file_without_end_is_refused(tmp_path, text, says):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert says in problems_of(path=path)[str(path)]


def test_a_nul_character_in_a_file_is_refused_by_line(tmp_path):
    (tmp_path / "run.yaml").write_text('trainer:\n  seed: 3\n  default_local_dir: "a\\0b"\n')
    with pytest.raises(ConfigError, match="line 3 holds a NUL character"):
        load_config(tmp_path / "run.yaml", [])


def test_aliases_that_repeat_a_little_are_taken(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("actor_rollout_ref: {actor: {optim: &o {lr: 0.5}}}\ncritic: {optim: *o}\n")
    assert load(path=path).config.critic.optim.lr == 0.5
    assert yaml_file.MAX_VALUES > 10_000  # verl's printed configurations have fewer than a thousand


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.seed={null:2}", "cannot be read"),
        ("data.apply_chat_template_kwargs={null:2}", "cannot be read"),
        ("trainer.seed=-1", "from 0 to"),
        ("trainer.seed=18446744073709551616", "from 0 to"),
        ("data.seed=-1", "from 0 to"),
        (f"{BETAS}=[0.9,1.5]", "below 1"),
        (f"{BETAS}=[0.9,1]", "below 1"),
        (f"{BETAS}=[-0.1,0.9]", "below 1"),
        ("trainer.experiment_name=''", "not empty"),
        ("trainer.experiment_name=", "not empty"),
        ("trainer.project_name='  '", "not empty"),
        ('trainer.experiment_name="a\nb"', "one line"),
        ('trainer.experiment_name="a\x00b"', "holds a NUL character"),
        ('data.train_files="a\x00b"', "holds a NUL character"),
        ("~trainer.seed=5", "is not its value"),
        ("data.train_files=" + "[" * 2000 + "]" * 2000, "nested too deeply"),
        ("trainer.project_name=" + "[" * 300 + "]" * 300, "trainer.project_name: is nested too deeply"),
        ("trainer.project_name=" + "{a: " * 110 + "1" + "}" * 110, "trainer.project_name: is nested too deeply"),
        ("trainer.seed=" + "9" * 5000, "trainer.seed: cannot be read (Exceeds the limit"),
    ],
)
def test_impossible_values_are_refused(override, says):
    ((_, text),) = problems_of(override).items()
    assert says in text


def test_a_key_with_its_own_value_may_be_taken_out():
    assert load("trainer.seed=5", "~trainer.seed=5").config.trainer.seed == 1


KWARGS = "data.apply_chat_template_kwargs"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([f"~{KWARGS}.b"], f"{KWARGS}.b: is not set, so there is nothing to delete"),
        ([f"~{KWARGS}.a.c"], f"{KWARGS}.a.c: is not set"),
        ([f"~{KWARGS}.a=true"], "True is not its value"),
        ([f"+{KWARGS}.x=[1,2]", f"{KWARGS}.x.2=5"], f"{KWARGS}.x.2: is no index of the list"),
        ([f"+{KWARGS}.x=[1,2]", f"+{KWARGS}.x.y=5"], "is no index of the list"),
    ],
)
def test_what_hydra_does_not_find_in_a_mapping_is_refused(overrides, says):
    ((_, text),) = problems_of(f"+{KWARGS}.a=false", *overrides).items()
    assert says in text


def test_a_place_in_a_list_of_a_mapping_is_set_as_hydra_sets_it():
    config = load(f"+{KWARGS}.x=[1,{{y: 2}}]", f"{KWARGS}.x.0=5", f"{KWARGS}.x.1.z=3").config
    assert config.data.apply_chat_template_kwargs == {"x": [5, {"y": 2, "z": 3}]}
    assert load(f"+{KWARGS}.x=1", f"~{KWARGS}.x=1").config.data.apply_chat_template_kwargs == {}


def test_a_number_of_thousands_of_digits_in_a_file_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"trainer: {{seed: {'9' * 5000}}}\n")
    assert "Exceeds the limit" in problems_of(path=path)[str(path)]


@pytest.mark.parametrize("letter", ["\x85", "\u2028", "\u2029", "\r", "\n"])
def test_odd_line_breaks_survive_what_is_written(tmp_path, letter):
    text = f"a{letter}b"
    for unicode in (True, False):
        assert yaml.safe_load(yaml.dump({"a": text}, Dumper=Dumper, allow_unicode=unicode, width=10**6)) == {"a": text}
    path = tmp_path / "run.yaml"
    loaded = load_config(None, [*BASE, Override(f"{KWARGS}.x", text, False)])
    path.write_text(loaded.to_yaml(), encoding="utf-8")
    assert load_config(path, []).config == loaded.config


@pytest.mark.parametrize("text", ["trainer..seed=5", ".seed=3", "trainer.=3", "=3"])
def test_a_broken_key_is_not_told_to_quote_its_value(text):
    assert "quote" not in problems_of(text)[text]


def test_a_bad_second_name_is_one_problem():
    assert list(problems_of("critic.ppo_micro_batch_size=x", "critic.ppo_micro_batch_size_per_gpu=y")) == [
        "critic.ppo_micro_batch_size_per_gpu"
    ]
