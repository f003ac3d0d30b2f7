"""Defaults lists, beside what Hydra's own composition makes of the same files."""

import time

import pytest
from hydra import compose as hydras_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from tests.config.loading import load, problems_of
from tether.config.loading.compose import compose
from tether.config.loading.yaml_file import read_yaml

pytestmark = pytest.mark.filterwarnings("ignore:.*missing `_self_`")


@pytest.fixture
def write(tmp_path):
    """Write files into a folder, with __ for / in their names and HERE for the folder."""

    def run(files, name="files"):
        folder = tmp_path / name
        for file, text in files.items():
            path = folder / f"{file.replace('__', '/')}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("HERE", str(folder)), encoding="utf-8")
        return folder

    return run


def hydras(folder):
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(folder), version_base=None):
            return OmegaConf.to_container(hydras_compose("run"), resolve=False)
    finally:
        OmegaConf.clear_resolver("now")  # which Hydra registers for the whole process


def ours(folder, built_in=lambda name: None):
    path = folder / "run.yaml"
    return compose(path, read_yaml(path), built_in)


G_P = {"g__p": "# @package foo\na: 1\n"}
SAME = {
    "a place below another comment": {"run": "defaults: [{g: p}]\n", "g__p": "# (c) me\n# @package _global_\na: 1\n"},
    "a place below an empty line": {"run": "defaults: [{g: p}]\n", "g__p": "\n\n# @package _global_\na: 1\n"},
    "a place after 512 characters": {"run": "defaults: [{g: p}]\n", "g__p": "\n" * 512 + "# @package x\na: 1\n"},
    "a place below a parent": {"run": "defaults: [{g: q}]\n", "g__q": "defaults: [p]\nb: 1\n", **G_P},
    "a place of another group": {"run": "defaults: [{h: q}]\n", "h__q": "defaults: [{/g: p}]\nb: 1\n", **G_P},
    "a place of the file itself": {"run": "# @package foo\ndefaults: [{g: q}]\na: 1\n", "g__q": "b: 1\n"},
    "a place without a list": {"run": "# @package foo\na: 1\n"},
    "a folder in a choice": {"run": "defaults: [{g: long/p}]\n", "g__long__p": "a: 1\n"},
    "folders in choices": {"run": "defaults: [{g: [long/p]}]\n", "g__long__p": "a: 1\n"},
    "a list below such a choice": {"run": "defaults: [{g: s/p}]\n", "g__s__p": "defaults: [q]\n", "g__q": "a: 1\n"},
    "@_group_": {"run": "defaults: [{g@x: p}]\n", "g__p": "defaults: [/h/q@_group_]\n", "h__q": "a: 1\n"},
    "@_group_.k": {"run": "defaults: [{g@_group_.k: p}]\n", "g__p": "a: 1\n"},
    "@_global_.k": {"run": "defaults: [{g: p}]\n", "g__p": "defaults: [/h/q@_global_.k]\n", "h__q": "a: 1\n"},
    "an empty @": {"run": "defaults: [{g: q}, {g@: p}]\n", "g__p": "a: 1\n", "g__q": "a: 2\n"},
    "an ending": {"run": "defaults: [{g: p.yaml}, base.yaml]\n", "g__p": "a: 1\n", "base": "b: 1\n"},
    "a choice of a later line": {"run": "defaults: [{h: '${g}'}, {g: p}]\n", "g__p": "a: 1\n", "h__p": "b: 1\n"},
    "a choice in a file's name": {"run": "defaults: ['h/${g}', {g: p}]\n", "g__p": "a: 1\n", "h__p": "b: 1\n"},
    "a choice by the environment": {"run": "defaults: [{g: '${oc.env:NO_SUCH_VARIABLE,p}'}]\n", "g__p": "a: 1\n"},
    "override in a preset": {
        "run": "defaults: [{g: p}, _self_, {experiment: e}]\n",
        "g__p": "a: 1\n",
        "g__q": "a: 2\n",
        "experiment__e": "# @package _global_\ndefaults: [_self_, {override /g: q}]\nx: 1\n",
    },
    "optional override": {"run": "defaults: [{g: p}, {optional override g: q}]\n", "g__p": "a: 1\n", "g__q": "a: 2\n"},
    "a folder without file://": {
        "run": "hydra: {searchpath: [HERE/other]}\ndefaults: [{g: p}]\na: 1\n",
        "other__g__p": "b: 1\n",
    },
    "hydra in a preset": {"run": "defaults: [{g: p}]\n", "g__p": "hydra: {run: {dir: x}}\na: 1\n"},
    "null twice": {"run": "defaults: [{g: null}, {g: null}]\na: 1\n", "g__p": ""},
}


def test_a_list_is_composed_as_hydra_does(write):
    folders = {case: write(files, str(number)) for number, (case, files) in enumerate(SAME.items())}
    composed = {case: (ours(folder), (hydras(folder), [])) for case, folder in folders.items()}
    assert {case: pair for case, pair in composed.items() if pair[0] != pair[1]} == {}


REFUSED = {
    "[{trainer: p}, {trainer: q}]": "`- trainer: p` is the second line that chooses trainer. keep one",
    "[{trainer: p}, {trainer: p}]": "is the second line that chooses trainer",
    "[_self_, _self_]": "`- _self_` is written twice. keep one",
    "{trainer: p}": "is no list. write it as one, defaults: [GROUP: NAME, _self_]",
    "base": "`defaults: base` is no list",
    "null": "`defaults: null` is no list",
    "[{trainer: p, h: p}]": "`- trainer: p, h: p` has 2 groups. give each group a line of its own",
    "[{}]": "has 0 groups",
    "[{trainer: 1}]": '`- trainer: 1` chooses 1, which is not a string. write it in quotes, "1"',
    "[{trainer: true}]": "which is not a string",
    "[{trainer: [p, 1]}]": "which is not a string",
    "[{trainer: ['${h}']}, {h: p}]": "has ${...} in a list of choices",
    "[1]": "`- 1` names no file",
    "[null]": "`- null` names no file",
    "[optional zz]": "`- optional zz` names no choice. write optional GROUP: NAME",
    "[_self_@x]": "mounts the file's own keys elsewhere",
    "[{trainer: '???'}]": "`- trainer: ???` leaves the choice open",
    "[{override trainer: q}, {trainer: p}]": "`- trainer: p` comes after an override",
    "[{override trainer: q}]": "`- override trainer: q` replaces no choice: nothing else chooses trainer",
    "[{trainer: '${nope}'}]": "`- trainer: ${nope}` has ${...} that resolves to no name",
    "[{'': p}]": "names no group",
    "[wide]": "in wide.yaml, `# @package _global_ x` is not a name and one word. write # @package NAME",
    "[search]": "hydra.searchpath: is not read from a preset",
}


def test_what_hydra_refuses_is_said_in_words(write):
    texts = {
        **dict.fromkeys(("base", "h__p", "trainer__p", "trainer__q", "trainer__1", "trainer__true"), "a: 1\n"),
        "wide": "# @package _global_ x\n",
        "search": "hydra: {searchpath: [x]}\n",
    }
    said = {}
    for defaults in REFUSED:
        folder = write(texts | {"run": f"defaults: {defaults}\n"})
        said[defaults] = " ".join(map(str, ours(folder)[1]))
        with pytest.raises(Exception):  # noqa: B017  (of several kinds, assertions among them)
            hydras(folder)
    assert {defaults: text for defaults, text in said.items() if REFUSED[defaults] not in text} == {}


@pytest.mark.parametrize("words", ["here", "group"])
def test_a_place_that_hydra_takes_for_a_key_is_refused(write, words):
    folder = write({"run": "defaults: [{g: p}]\n", "g__p": f"# @package _{words}_\na: 1\n"})
    assert "which is valid in a defaults list only" in str(ours(folder)[1][0])
    folder = write({"run": "defaults: [{g: p}]\n", "g__p": "defaults: [../base]\n", "base": "a: 1\n"})
    assert "has no mount point for the keys of another folder" in str(ours(folder)[1][0])


def test_many_comments_take_no_time(write):
    folder = write({"run": "defaults: [{g: p}]\n", "g__p": "# note\n\n" * 2000 + "a: 1\n"})
    start = time.monotonic()
    assert ours(folder) == ({"g": {"a": 1}}, [])
    assert time.monotonic() - start < 5


def test_a_file_over_the_one_of_verl_that_has_its_name(write):
    folder = write({"ppo_trainer": "defaults: [ppo_trainer, _self_]\ndata: {seed: 3}\n"})
    assert load(path=folder / "ppo_trainer.yaml").config.data.seed == 3
    folder = write({"ppo_megatron_trainer": "defaults: [ppo_megatron_trainer, _self_]\n"})
    assert load(path=folder / "ppo_megatron_trainer.yaml").config.actor_rollout_ref.actor.strategy == "megatron"


def test_hydras_section_in_a_preset_is_told(write):
    folder = write({"run": "defaults: [base]\n", "base": "hydra: {run: {dir: x}}\n"})
    assert "hydra.run.dir" in problems_of(path=folder / "run.yaml")


def test_the_place_of_a_file_counts_without_a_list(write):
    folder = write({"run": "# @package trainer\nseed: 3\n"})
    assert load(path=folder / "run.yaml").config.trainer.seed == 3


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer=other", "- override trainer: other"),
        ("env@env.train=maniskill", "- override env@env.train: maniskill"),
        ("hydra.searchpath=[x]", "write it in the run's file, hydra: {searchpath: [...]}"),
    ],
)
def test_what_hydra_composes_by_the_command_line_belongs_into_the_file(override, says):
    ((_, text),) = problems_of(override).items()
    assert says in text
