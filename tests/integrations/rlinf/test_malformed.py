"""RLinf files in which something else stands where a section, a list or a value belongs: named, and no traceback."""

import contextlib
import copy
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tether.config import ConfigError
from tether.config.loading.overrides import parse_overrides
from tether.integrations.rlinf.importer import TABLES, apply, fixed, import_file

EMBODIED = """
    runner: {task_type: embodied, max_epochs: 3}
    cluster: {node_groups: [{label: a, node_ranks: 0}], component_placement: {"actor,env,rollout": all}}
    env: {train: {env_type: gymnasium, init_params: {id: CartPole-v1, x: 1}, total_num_envs: 4}}
    algorithm: {adv_type: gae, gamma: 0.9}
    """
TEXT = """
    runner: {task_type: reasoning, max_epochs: 3}
    algorithm: {adv_type: gae, loss_type: actor}
    critic: {use_critic_model: true}
    """
PAGES = [yaml.safe_load(path.read_text()) for path in sorted(Path(__file__).parent.glob("page_*.yaml"))]
ODD = ["x", "", 3, -1, 1.5, float("inf"), True, None, [], [1], ["x"], [None], {}, {"a": 1}, {1: 2}, [{"a": 1}], "8"]
NAMES = ["gae", "grpo", "fsdp", "openvla", "openpi", "gymnasium", "maniskill", "cosine", "aux_loss", 10**30, "${nope}"]


def places(tree, above=()):
    for name, value in tree.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from places(value, (*above, name))


def put(tree, place, value):
    tree = copy.deepcopy(tree)
    inner = tree
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return tree


def said(result):
    return {problem.path: str(problem) for problem in (*result.problems, *result.refusals())}


@pytest.mark.parametrize(
    ("text", "override", "key", "says"),
    [
        (EMBODIED, "runner=x", "runner", "x stands where a section of keys belongs"),
        (TEXT, "runner=x", "runner", "x stands where a section of keys belongs"),
        (TEXT, "runner=[1]", "runner", "[1] stands where a section of keys belongs"),
        ("runner: {task_type: embodied}\nenv: x", "runner.a=1", "env", "x stands where a section of keys belongs"),
        ("actor: {}\nenv: {train: [1]}", "runner.a=1", "env.train", "[1] stands where a section of keys belongs"),
        (EMBODIED, "actor.model=${runner.max_epochs}", "actor.model", "3 stands where a section of keys belongs"),
        (EMBODIED, "env.train.init_params=x", "env.train.init_params", "x is refused: arguments of an environment are"),
        (EMBODIED, "env.train.init_params=[]", "env.train.init_params", "[] is refused: arguments of an environment"),
        (TEXT, "algorithm.group_size=x", "algorithm.group_size", "x is refused: it is not a whole number above 0"),
    ],
)
def test_what_is_of_the_wrong_kind_is_named(imported, text, override, key, says):
    assert says in said(imported(text, override, "data.rollout_batch_size=4"))[key]


@pytest.mark.parametrize("override", ["runner.x=3", "runner.task_type={a: 1}"])
def test_a_key_in_a_list_is_named(imported, override):
    with pytest.raises(ConfigError, match=r"runner.*does not fit what the file has there"):
        imported(TEXT, "runner=[1]", override)


@pytest.mark.parametrize(("value", "key"), [("[1]", "env"), ("{train: [1]}", "env.train")])
def test_a_list_over_a_section_of_a_preset_is_named(tmp_path, value, key):
    (tmp_path / "env").mkdir()
    (tmp_path / "env/some.yaml").write_text("x: 1")
    (tmp_path / "run.yaml").write_text(f"defaults: [env/some@env.train]\nrunner: {{}}\nenv: {value}\n")
    with pytest.raises(ConfigError, match=rf"run\.yaml: {key} is a list in one of the file and its presets"):
        import_file(tmp_path / "run.yaml", [])


def test_a_search_path_is_a_list(imported):
    assert "3 is no list" in said(imported("hydra: {searchpath: 3}\nrunner: {}"))["hydra.searchpath"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("${multiply:4,'8'}", "'8' is not a number; write it as one, without quotes"),
        ("${multiply:${env.train.group_size},4}", "'8' is not a number"),
        ("${multiply:true,3}", "True is not a number"),
        ("${subtract:null,3}", "None is not a number"),
        ("${int_div:3,0}", "zero"),
        ("${not:'False'}", "'False' is a string, neither true nor false"),
    ],
)
def test_arithmetic_of_texts_is_refused(imported, value, says):
    problem = said(imported(EMBODIED, "env.train.group_size='8'", f'actor.global_batch_size="{value}"'))
    assert says in problem["actor.global_batch_size"]
    assert "environment variable" not in problem["actor.global_batch_size"]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(PAGES), st.data())
def test_anything_in_the_place_of_anything(tmp_path_factory, tree, data):
    place = data.draw(st.sampled_from(list(places(tree))))
    path = tmp_path_factory.getbasetemp() / "any_rlinf.yaml"
    path.write_text(yaml.safe_dump(put(tree, place, data.draw(st.sampled_from(ODD)))))
    with contextlib.suppress(ConfigError):
        import_file(path, [])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["embodied", "reasoning"]), st.data())
def test_any_values_of_any_keys(task, data):
    keys = st.sampled_from([key for key in TABLES[task] if "*" not in key])
    values = data.draw(st.dictionaries(keys, st.sampled_from(ODD + NAMES), max_size=20))
    apply(TABLES[task], values, fixed(values) if task == "embodied" else {}, {})


SECTIONS = ["runner", "env", "env.train", "env.train.init_params", "actor.model", "cluster.node_groups", "algorithm"]
LINES = [f"{prefix}{key}{end}" for key in SECTIONS for prefix, end in [
    ("", "=x"), ("", "=[1]"), ("", "={a: 1}"), ("~", ""), ("~", ".x"), ("", ".x.y=1"), ("", "[0]=1"), ("", "=${env}"),
]]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([EMBODIED, TEXT]), st.lists(st.sampled_from(LINES), max_size=3))
@example(EMBODIED, ["env.train=${env}", "~env.train.x"])
@example(EMBODIED, ["~cluster.node_groups.x"])
def test_any_override(tmp_path_factory, text, overrides):
    path = tmp_path_factory.getbasetemp() / "any_rlinf.yaml"
    path.write_text(textwrap.dedent(text))
    with contextlib.suppress(ConfigError):
        import_file(path, parse_overrides(overrides)[0])
