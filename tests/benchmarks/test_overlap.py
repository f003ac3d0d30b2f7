"""The discrete-event model of asynchronous training, by hand; and what its table says."""

import pytest

from benchmarks.overlap import Times, makespan, table

SAMPLING, TRAINING = [1.0, 1.0, 4.0, 1.0], [2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("ahead", "seconds"),
    [
        (0, 15),  # 7 of sampling and 8 of training, in turns
        # Batches are there at 1, 2, 7 (asked for at 3, when step 2 begins) and 8; steps end at 3, 5, 9 and 11.
        (1, 11),
        # Batch 3 is asked for at 0 and there at 6, batch 4 at 7; steps end at 3, 5, 8 and 10.
        (2, 10),
        (3, 10),  # sampling is done early anyway
    ],
)
def test_a_makespan_by_hand(ahead: int, seconds: float) -> None:
    assert makespan(SAMPLING, TRAINING, ahead) == seconds


def test_no_side_is_faster_than_itself() -> None:
    assert makespan([5.0] * 3, [1.0] * 3, 99) == 16
    assert makespan([1.0] * 3, [5.0] * 3, 99) == 16


def test_the_table_compares_with_turns() -> None:
    """Turns take 15 s; one ahead takes 12.5 where 11 were possible with the times of turns, and with its own."""
    turns = Times(SAMPLING, TRAINING, [3.0, 3.0, 6.0, 3.0])
    ahead = Times(SAMPLING, TRAINING, [3.0, 2.5, 4.0, 3.0])
    lines = table({"here": {"synchronous": [turns], "one step off": [ahead]}}).splitlines()
    assert lines[2] == "| here | synchronous | 1.75 | 2.00 | 3.75 | 3.75 | 1.00x | 1.00x |"
    assert lines[3] == "| here | one step off | 1.75 | 2.00 | 3.12 | 2.75 | 1.20x | 1.36x |"
