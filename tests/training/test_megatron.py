"""An engine in Megatron's parts gives what one process gives, whatever the layout."""

import importlib.util
from typing import Any

import pytest

from tests.training.fsdp_ranks import on_ranks
from tether.models.megatron import Layout

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
pytestmark = pytest.mark.skipif(not HAS_MEGATRON, reason="needs megatron-core: pip install 'tether[megatron]'")
TOLERANCE = 1e-10
LAYOUTS: dict[str, tuple[int, Layout]] = {
    "TP 2": (2, Layout(tensor=2)),
    "PP 2": (2, Layout(pipeline=2)),
    "2 replicas": (2, Layout()),
    "TP 2, PP 2, sequence parallel": (4, Layout(tensor=2, pipeline=2, sequence_parallel=True)),
    "TP 2, 2 replicas": (4, Layout(tensor=2)),
    "PP 2, 2 replicas": (4, Layout(pipeline=2)),
}
QUICK = "TP 2"


@pytest.fixture(
    scope="module", params=[name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The name of a layout, and what its ranks found."""
    work = importlib.import_module("tests.training.megatron_ranks").everything
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
    masters, exported = group[1].get("narrow", (0.0, 0.0))
    assert masters < 0.1
    assert exported < 0.1
