"""`${...}` means what it means to OmegaConf, whether a value is resolved in a tree of what it needs or in the whole."""

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tests.config.loading import BASE
from tether.config import load_config
from tether.config.loading import interpolation
from tether.config.loading.interpolation import Values, nest

WRITTEN = {
    "a.n": 3, "a.text": "x", "a.none": None, "a.missing": "???", "a.list": [1, "${a.n}"], "a.map": {"k": "${a.text}"},
    "b.same": "${a.n}", "b.chain": "${b.same}", "b.joined": "${a.n} and ${b.chain}${a.text}", "b.escaped": r"\${a.n}",
    "b.list": ["${b.same}", {"k": "${a.text}"}], "b.container": "${a.list}", "b.null": "${a.none}",
    "b.deeper": "${a.map.k}", "b.place": "${a.list.1}", "b.section": "${a}", "b.relative": "${.same}",
    "b.named": "${a.${c}}", "c": "text", "b.resolver": "${oc.env:TETHER_NONE,7}", "b.key": {"${a.n}": 1},
    "b.to_missing": "${a.missing}", "b.nowhere": "${a.nope}", "b.loop": "${b.pool}", "b.pool": "${b.loop}",
    "b.open": "${a.n", "b.spaces": "${ a.n }", "b.dash": "${a.n-1}",
}  # fmt: skip


def told(tree, path):
    try:
        value = OmegaConf.select(tree, path)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except (OmegaConfBaseException, RecursionError) as error:
        return type(error)


@pytest.mark.parametrize("path", [path for path, value in WRITTEN.items() if interpolation.interpolates(value)])
def test_a_value_is_what_omegaconf_says(path):
    if path in ("b.open", "b.spaces", "b.dash"):
        written = {**{p: v for p, v in WRITTEN.items() if p[:2] in ("a.", "c")}, path: WRITTEN[path]}
    else:
        written = {p: v for p, v in WRITTEN.items() if p not in ("b.open", "b.spaces", "b.dash")}
    try:
        expected = told(OmegaConf.create(nest(written)), path)
    except OmegaConfBaseException as error:
        expected = type(error)
    try:
        found = Values(written)[path]
    except (OmegaConfBaseException, RecursionError) as error:
        found = type(error)
    assert found == expected


def test_a_written_value_counts_at_once():
    values = Values(WRITTEN)
    assert values["b.chain"] == 3
    values["a.n"] = 4
    assert values["b.chain"] == 4


def test_no_load_fills_a_tree_with_all_keys(monkeypatch):
    """Which would take three quarters of it."""
    made = []
    monkeypatch.setattr(interpolation, "nest", lambda flat: made.append(len(flat)) or nest(flat))
    load_config(None, BASE)
    assert made
    assert max(made) < 10
