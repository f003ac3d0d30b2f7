"""The speed tables say what was measured: goals, medians, exponents, limits. No peer is needed and nothing is timed."""

import pytest

from benchmarks.__main__ import BEGIN, END, by_hand, summary
from benchmarks.profile import OTHER, kind_of
from benchmarks.scaling import exponent
from benchmarks.speed import machine
from benchmarks.speed.machine import Roofline
from benchmarks.speed.table import Goal, Section
from benchmarks.speed.timing import take_turns


def test_a_goal_is_met_from_its_side() -> None:
    assert Goal("ratio", 4.0, 4.0).met
    assert not Goal("ratio", 3.9, 4.0).met
    assert Goal("seconds", 0.5, 0.5, at_most=True).met
    assert not Goal("seconds", 0.6, 0.5, at_most=True).met


def test_markdown() -> None:
    section = Section("Title", ["Two", "words."], ("", "s"), [["tether", "1.0"]], [Goal("speed", 1.0, 2.0)])
    assert section.markdown().splitlines() == [
        "## Title",
        "",
        "Two words.",
        "",
        "|  | s |",
        "|---|---|",
        "| tether | 1.0 |",
        "",
        "| goal |  | measured |  |",
        "|---|---|---|---|",
        "| speed | at least 2.00 | 1.00 | **not met** |",
    ]


def test_the_page_begins_with_all_goals() -> None:
    goals = [Goal("speed", 1.0, 2.0), Goal("memory", 0.4, 0.5, at_most=True)]
    sections = [
        Section("First", [], (), [], goals[:1]),
        Section("Bare", [], (), []),
        Section("Last", [], (), [], goals[1:]),
    ]
    assert summary(sections).splitlines()[1:-1] == [
        "1 of 2 goals are met:",
        "",
        "| table | goal |  | measured |  |",
        "|---|---|---|---|---|",
        "| First | speed | at least 2.00 | 1.00 | **not met** |",
        "| Last | memory | at most 0.50 | 0.40 | met |",
    ]


def test_sides_alternate_and_the_first_round_does_not_count() -> None:
    order: list[tuple[str, int]] = []

    def side(name: str, *times: float):
        def run(number: int) -> float:
            order.append((name, number))
            return times[number]

        return run

    assert take_turns({"a": side("a", 99, 1, 5, 2), "b": side("b", 99, 4, 4, 7)}, runs=3) == {"a": 2, "b": 4}
    assert take_turns({"a": side("a", 99, 98, 3), "b": side("b", 99, 1, 4)}, runs=1, warm_up=2) == {"a": 3, "b": 4}
    assert order[:4] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


def test_exponents() -> None:
    sizes = [1, 2, 4, 8]
    assert exponent(sizes, [3 * n**2 for n in sizes]) == pytest.approx(2)
    assert exponent(sizes, [5, 5, 5, 5]) == pytest.approx(0)


def test_the_limit_of_decoding_is_products_or_memory() -> None:
    """100 entries: 200 bytes to read a step, 200 operations a row. Both take 2 s a step at 100 rows."""
    roof = Roofline(rate=10_000, bandwidth=100, weights=90, head=10)
    assert roof.decoding(rows=1, steps=3) == 6
    assert roof.decoding(rows=100, steps=3) == 6
    assert roof.decoding(rows=200, steps=3) == 12
    assert roof.training(model_tokens=100, head_tokens=50) == pytest.approx(3 * 2 * (9000 + 500) / 10_000)
    prompts = 2 * (90 * 50 + 10 * 2) / 10_000
    assert roof.generating(prompts=2, prompt_tokens=50, rows=200, new_tokens=4) == pytest.approx(prompts + 12)


def test_a_disturbed_moment_does_not_lower_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SIZE", 64)  # processors without bfloat16 take minutes for the real sizes
    monkeypatch.setattr(machine, "LARGE", 1 << 16)
    fast = Roofline(rate=1e18, bandwidth=1e18, weights=90, head=10)
    assert fast.measured_again() == fast
    slow = Roofline(rate=1, bandwidth=1, weights=90, head=10).measured_again()
    assert slow.rate > 1
    assert slow.bandwidth > 1


def test_kinds_of_operators() -> None:
    assert kind_of("mkldnn::_linear_pointwise") == "matrix products"
    assert kind_of("aten::_scaled_dot_product_flash_attention_for_cpu") == "attention"
    assert kind_of("aten::_fused_adamw_") == "optimizer"
    assert kind_of("autograd::engine::evaluate_function: MmBackward0") == OTHER


def test_what_is_written_by_hand_stays(tmp_path) -> None:
    page = tmp_path / "performance.md"
    assert by_hand(page) == "\n"
    page.write_text(f"# Old\n{BEGIN}\nold table\n{END}\n\n## What it means\n")
    assert by_hand(page) == "\n\n## What it means\n"
