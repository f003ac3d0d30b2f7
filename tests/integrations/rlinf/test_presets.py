"""Hydra's defaults lists, and the values of what they compose: order, mount points, interpolations, resolvers."""

import pytest
from omegaconf import OmegaConf

from tether.config import ConfigError
from tether.config.loading.compose import compose
from tether.config.loading.yaml_file import read_yaml
from tether.integrations.rlinf.importer import _without_effect
from tether.integrations.rlinf.rows import NoEffect, to
from tether.integrations.rlinf.values import RESOLVERS, resolvers, values_of


@pytest.fixture
def composed(tmp_path):
    """Write files, and compose `run.yaml`."""

    def run(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text.replace("HERE", str(tmp_path)))
        path = tmp_path / "run.yaml"
        return compose(path, read_yaml(path), _without_effect)

    return run


PRESET = "size: 1\nkind: preset\n"


@pytest.mark.parametrize(
    ("defaults", "tree"),
    [
        ("[model/small@actor.model]", {"actor": {"model": {"size": 1, "kind": "preset"}}}),
        ("[{model@actor.model: small}]", {"actor": {"model": {"size": 1, "kind": "preset"}}}),
        ("[model/small]", {"model": {"size": 1, "kind": "preset"}}),
        ("[/model/small@_global_]", {"size": 1, "kind": "preset"}),
        ("[model/small@_here_]", {"size": 1, "kind": "preset"}),
        ("[{optional model: null}, _self_]", {}),
        ("[override hydra/job_logging: stdout]", {}),
        ("[{optional model: none}, {optional model@gone: none}]", {}),
        ("[model/top]", {"size": 5}),
        ("[model/top@a]", {"a": {"size": 5}}),
        ("[{kind: small}, {model@m: '${kind}'}]", {"kind": 1, "m": {"size": 1, "kind": "preset"}}),
        ("[hybrid_engines/fsdp@actor.fsdp_config, weight_syncer/patch@weight_syncer]", {}),
    ],
)
def test_where_presets_are_mounted(composed, defaults, tree):
    files = {"model/small.yaml": PRESET, "model/top.yaml": "\n# @package _global_\nsize: 5\n"}
    files["kind/small.yaml"] = "# @package _global_\nkind: 1\n"
    assert composed(files | {"run.yaml": f"defaults: {defaults}\n"}) == (tree, [])


@pytest.mark.parametrize(
    ("override", "size"),
    [("override model: large", 2), ("override /model: large", 2), ("override model@m: large", None), ("hydra: x", 1)],
)
def test_a_choice_in_place_of_that_of_a_preset(composed, override, size):
    tree, problems = composed(
        {
            "run.yaml": f"defaults: [base, {{{override}}}, _self_]\n",
            "base.yaml": "defaults: [{model: small}]\n",
            "model/small.yaml": "size: 1\n",
            "model/large.yaml": "size: 2\n",
            "hydra/x.yaml": "",
        }
    )
    if size is None:
        assert "nothing else chooses model@m" in str(problems[0])
    else:
        assert (tree["model"]["size"], problems) == (size, [])


def test_the_file_goes_over_its_presets_unless_it_says_otherwise(composed):
    files = {"model/small.yaml": PRESET}
    tree, _ = composed(files | {"run.yaml": "defaults: [model/small]\nmodel: {size: 2}\n"})
    assert tree["model"] == {"size": 2, "kind": "preset"}
    tree, _ = composed(files | {"run.yaml": "defaults: [_self_, model/small]\nmodel: {size: 2}\n"})
    assert tree["model"] == {"size": 1, "kind": "preset"}


def test_presets_have_presets(composed):
    tree, problems = composed(
        {
            "run.yaml": "defaults: [model/large@actor.model]\n",
            "model/large.yaml": "defaults: [/model/small@_here_]\nsize: 3\n",
            "model/small.yaml": PRESET,
        }
    )
    assert problems == []
    assert tree == {"actor": {"model": {"size": 3, "kind": "preset"}}}


def test_a_preset_on_the_search_path(composed):
    search = "hydra: {searchpath: ['file://${oc.env:UNSET_VARIABLE}/x', 'pkg://y', 'file://HERE/other']}\n"
    tree, problems = composed({"run.yaml": f"defaults: [model/small]\n{search}", "other/model/small.yaml": PRESET})
    assert (tree["model"]["size"], problems) == (1, [])


def test_what_is_missing_is_named(composed, tmp_path):
    _, problems = composed({"run.yaml": "defaults: [env/a@env.train, env/b@env.eval]\n"})
    first, second = sorted(problems, key=str)
    assert str(first).startswith(f"defaults: env/a.yaml is not in {tmp_path}")
    assert "under env.train" in first.fix
    assert str(second).startswith("defaults: env/b.yaml is not in")


def test_a_folder_that_is_looked_into_twice_is_named_once(composed, tmp_path):
    search = "hydra: {searchpath: ['file://HERE/other', 'file://HERE/', 'file://HERE/other']}\n"
    _, problems = composed({"run.yaml": f"defaults: [env/a@env.train]\n{search}"})
    assert [problem.what for problem in problems] == [f"env/a.yaml is not in {tmp_path}, {tmp_path}/other"]


def test_a_circle_of_presets(composed):
    files = {"run.yaml": "defaults: [m/a]\n", "m/a.yaml": "defaults: [/m/b]\n", "m/b.yaml": "defaults: [/m/a]\n"}
    _, problems = composed(files)
    assert [str(problem) for problem in problems] == ["defaults: m/a includes itself. take the entry out"]


def test_a_preset_that_is_no_yaml(composed):
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        composed({"run.yaml": "defaults: [m/a]\n", "m/a.yaml": "a: [1\n"})


TABLE = {"a.*": to("x"), "mapping": to("x"), "idle": NoEffect(""), "off.*": NoEffect("")}


def test_values_are_resolved_one_by_one():
    tree = {
        "a": {"n": 6, "twice": "${multiply:${a.n},2}", "half": "${int_div:${.n},4}", "less": "${subtract:${a.n},1}"},
        "b": {"not": "${not:${a.n}}", "dtype": "${torch.dtype:bfloat16}", "a": "${a}", "lost": "${c.d}", "open": "???"},
        "c": {"broken": "${multiply:${a},2}"},
        "mapping": {"x": {"y": "${..z}"}, "z": 1},
        "idle": "${nowhere}",
        "off": {"x": "${nowhere}"},
    }
    values, problems = values_of(tree, {**TABLE, "a.n": to("x")})
    assert {key: value for key, value in values.items() if key.startswith("a.")} == {
        "a.n": 6,
        "a.twice": 12,
        "a.half": 1,
        "a.less": 5,
    }
    assert (values["b.not"], values["b.dtype"], values["b.a.n"]) == (False, "bfloat16", 6)
    assert values["mapping"] == {"x": {"y": 1}, "z": 1}
    assert "off.*" in values
    assert sorted(problem.path for problem in problems) == ["b.lost", "b.open", "c.broken"]


def test_resolvers_are_there_only_while_they_are_needed():
    with resolvers():
        assert OmegaConf.has_resolver("int_div")
    assert not any(OmegaConf.has_resolver(name) for name in RESOLVERS)


def test_a_resolver_of_somebody_else_stays():
    OmegaConf.register_new_resolver("multiply", lambda left, right: 0)
    try:
        assert values_of({"a": "${multiply:2,3}"}, {})[0] == {"a": 0}
        assert OmegaConf.has_resolver("multiply")
    finally:
        OmegaConf.clear_resolver("multiply")
