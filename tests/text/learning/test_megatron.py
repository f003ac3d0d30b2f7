"""An engine in Megatron's parts gives what one process gives, whatever the layout."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.installed import needs_megatron
from tests.ranks import on_ranks
from tether.integrations.megatron import MegatronLayout

pytestmark = needs_megatron
TOLERANCE = 1e-10
OF_EXPERTS_TOLERANCE = 1e-7  # transformers rounds the weights of experts to float32
LAYOUTS: dict[str, tuple[int, MegatronLayout]] = {
    "TP 2": (2, MegatronLayout(tensor=2)),
    "PP 2": (2, MegatronLayout(pipeline=2)),
    "2 replicas": (2, MegatronLayout()),
    "TP 2, PP 2, sequence parallel": (4, MegatronLayout(tensor=2, pipeline=2, sequence_parallel=True)),
    "TP 2, 2 replicas": (4, MegatronLayout(tensor=2)),
    "PP 2, 2 replicas": (4, MegatronLayout(pipeline=2)),
    "CP 2": (2, MegatronLayout(context=2)),
    "PP 2, 2 virtual stages": (2, MegatronLayout(pipeline=2, virtual_pipeline=2)),
    "TP 2, CP 2, sequence parallel": (4, MegatronLayout(tensor=2, context=2, sequence_parallel=True)),
    "PP 2, 2 virtual stages, CP 2": (4, MegatronLayout(pipeline=2, virtual_pipeline=2, context=2)),
}
QUICK = "TP 2"
SLOW = (
    "TP 2, PP 2, sequence parallel",
    "TP 2, 2 replicas",
    "TP 2, CP 2, sequence parallel",
    "PP 2, 2 virtual stages, CP 2",
)
"""The others are in `benchmarks.layouts`."""
OF_EXPERTS: dict[str, tuple[int, MegatronLayout]] = {
    "EP 2": (2, MegatronLayout(expert=2)),
    "PP 2, CP 2, EP 2": (4, MegatronLayout(pipeline=2, context=2, expert=2)),
    "TP 2, EP 2, whole experts": (4, MegatronLayout(tensor=2, expert=2, expert_tensor=1, sequence_parallel=True)),
    "TP 2, all experts whole": (2, MegatronLayout(tensor=2, expert_tensor=1, sequence_parallel=True)),
    "2 replicas, experts in parts": (2, MegatronLayout(expert_tensor=2)),
}
OF_ADAPTERS: dict[str, tuple[int, MegatronLayout]] = {
    "TP 2": (2, MegatronLayout(tensor=2)),
    "TP 2, sequence parallel": (2, MegatronLayout(tensor=2, sequence_parallel=True)),
    "PP 2": (2, MegatronLayout(pipeline=2)),
    "TP 2, PP 2, sequence parallel": (4, MegatronLayout(tensor=2, pipeline=2, sequence_parallel=True)),
    "PP 2, 2 virtual stages, CP 2": (4, MegatronLayout(pipeline=2, virtual_pipeline=2, context=2)),
    "TP 2, 2 replicas": (4, MegatronLayout(tensor=2)),
}
REPLAYED: dict[str, tuple[str, MegatronLayout]] = {
    "EP 2": ("qwen2_moe", MegatronLayout(expert=2)),
    "PP 2": ("qwen2_moe", MegatronLayout(pipeline=2)),
    "PP 2, the first stage is dense": ("deepseek_v3", MegatronLayout(pipeline=2)),
    "TP 2, sequence parallel": ("qwen3_moe", MegatronLayout(tensor=2, sequence_parallel=True)),
    "CP 2": ("qwen2_moe", MegatronLayout(context=2)),
    "TP 2, PP 2, EP 2": (
        "qwen2_moe",
        MegatronLayout(tensor=2, pipeline=2, expert=2, expert_tensor=1, sequence_parallel=True),
    ),
}
SINGLE = 2e-6  # transformers computes these routers in float32


@pytest.fixture(scope="module", params=[QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The name of a layout, and what its ranks found."""
    work = importlib.import_module("tests.text.learning.megatron_ranks").everything
    folder, (ranks, layout) = tmp_path_factory.mktemp("ranks"), LAYOUTS[request.param]
    return request.param, on_ranks(folder, ranks, work, folder, layout, request.param != QUICK)


def test_gradients_are_those_of_one_process(group: tuple[str, dict[str, Any]]) -> None:
    found = group[1]["gradients"] | group[1]["critic"]
    assert {case: far for case, far in found.items() if not far < TOLERANCE} == {}
    assert len(found) >= 5


def test_denominators_of_some_rows_are_noticed(group: tuple[str, dict[str, Any]]) -> None:
    assert group[1]["averaged"] > 1e-3


def test_outputs_are_those_of_one_process(group: tuple[str, dict[str, Any]]) -> None:
    spoken = [far for far in group[1]["inferred"] if far]
    assert spoken
    for far in spoken:
        assert far.keys() == {"log_probs", "entropy", "sum_pi_squared", "values", "bootstrap_values"}
        assert max(far.values()) < TOLERANCE


def test_updates_are_those_of_one_process(group: tuple[str, dict[str, Any]]) -> None:
    """Also where a loss must know all tokens of a mini-batch before it is cut."""
    for of_ranks in group[1]["updates"]:
        for far, metrics, expected, log_probs in of_ranks:
            assert far < 1e-8  # Adam makes more of a difference
            assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-9)
            assert log_probs < 1e-8


def test_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(group: tuple[str, dict[str, Any]]) -> None:
    assert group[1]["skipped"] == (1, 0, [3])


def test_state_has_no_layout(group: tuple[str, dict[str, Any]]) -> None:
    assert group[1]["resumed"]


def test_where_parts_lie_changes_no_result(group: tuple[str, dict[str, Any]]) -> None:
    assert all(far < 1e-8 for far in group[1].get("memory", {}).values())


def test_bfloat16_trains_its_float32_masters(group: tuple[str, dict[str, Any]]) -> None:
    """Weights that do not move are 0.2 away."""
    masters, exported = group[1].get("narrow", (0.0, 0.0))
    assert masters < 0.1
    assert exported < 0.1


@pytest.mark.parametrize(
    "name", [name if name == "EP 2" else pytest.param(name, marks=pytest.mark.slow) for name in OF_EXPERTS]
)
def test_mixtures_of_experts_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    """Also the gradient's norm, in which each expert counts once."""
    work = importlib.import_module("tests.text.learning.megatron_ranks").of_experts
    ranks, layout = OF_EXPERTS[name]
    found = on_ranks(tmp_path, ranks, work, tmp_path, layout)
    assert {case: far for case, far in found["gradients"].items() if not far < OF_EXPERTS_TOLERANCE} == {}
    balanced, without = found["balanced"]
    assert balanced < 1e-6 < without
    for far, metrics, expected, log_probs in found["updates"]:
        assert far < 1e-8
        assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert log_probs < 1e-8
    assert found["resumed"]


@pytest.mark.parametrize(
    "layout",
    [MegatronLayout(expert=2), pytest.param(MegatronLayout(pipeline=2), marks=pytest.mark.slow)],
    ids=["EP 2", "PP 2"],
)
def test_corrections_of_routers_are_saved_and_state_has_none(layout: MegatronLayout, tmp_path: Path) -> None:
    work = importlib.import_module("tests.text.learning.megatron_ranks").resumed_with_corrected_routers
    assert on_ranks(tmp_path, 2, work, tmp_path / "saved.pt", layout)


@pytest.mark.parametrize(
    "name", [name if name == "EP 2" else pytest.param(name, marks=pytest.mark.slow) for name in REPLAYED]
)
def test_experts_that_are_given_are_chosen(name: str, tmp_path: Path) -> None:
    """Where layers, tokens and experts are on many ranks, and layers are recomputed after other micro-batches ran."""
    work = importlib.import_module("tests.text.learning.megatron_ranks").replays
    model, layout = REPLAYED[name]
    tolerance = OF_EXPERTS_TOLERANCE if model == "qwen2_moe" else SINGLE
    found = on_ranks(tmp_path, max(2, layout.tensor * layout.pipeline * layout.context), work, layout, model)
    assert {case: far for case, far in found["gradients"].items() if not far < tolerance} == {}
    assert found["chosen"] > 1e-2
    spoken = [recorded for recorded in found["recorded"] if recorded]
    assert spoken
    for same, far in spoken:
        assert same
        assert far < tolerance


@pytest.mark.parametrize(
    ("name", "full"),
    [("TP 2, sequence parallel", False), *(pytest.param(name, True, marks=pytest.mark.slow) for name in OF_ADAPTERS)],
)
def test_adapters_are_those_of_one_process(name: str, full: bool, tmp_path: Path) -> None:
    """Those of layers that Megatron fuses, too, and of some of them alone; all other weights stay as they are."""
    pytest.importorskip("peft")
    work = importlib.import_module("tests.text.learning.megatron_ranks").of_adapters
    ranks, layout = OF_ADAPTERS[name]
    found = on_ranks(tmp_path, ranks, work, tmp_path, layout, full)
    assert {case: far for case, far in found["gradients"].items() if not far < TOLERANCE} == {}
    assert abs(found["norm"]) < 1e-8
    assert found["frozen"]
    assert found["weights"] < 1e-8
    spoken = [far for far in found["reference"] if far is not None]
    assert spoken
    assert max(spoken) < TOLERANCE
    assert found["resumed"]
    if not full:
        return
    assert len(found["gradients"]) >= 8
    assert found["memory"], "where weights and state rest changes no bit"
    far, masters_are_saved = found["narrow"]
    assert abs(far) < 0.05
    assert masters_are_saved
    assert "lm_head would get an adapter, which Megatron holds in attention and MLP alone" in found["refused"][0]
    stages = [error for error in found["refused"][1:] if "leave a pipeline stage without an adapter" in error]
    assert len(stages) == (layout.pipeline > 1)
