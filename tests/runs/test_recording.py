"""What a run records for `tether view`, without being asked."""

import json
from pathlib import Path

import numpy as np

from tests.runs.golden import STEPS, Golden
from tests.runs.loops import Text
from tether.metrics.loggers.jsonl import read_events, read_metrics
from tether.metrics.records import FREE_STEPS, RECORDS_FILE, RecordFile, heads, pack, read_record, unpack

TOKEN_VALUES = {
    "sampler_log_probs", "old_log_probs", "new_log_probs", "ref_log_probs", "entropy", "advantages", "values",
    "returns", "rewards",
}  # fmt: skip
STEP_VALUES = {"rewards", "shaped_rewards", "values", "advantages", "returns", "log_probs"}


def records(folder: Path, kind: str) -> dict[int, dict]:
    file = folder / RECORDS_FILE
    return {head.step: read_record(file, head) for head in heads(file) if head.kind == kind}


def test_a_default_run_records_chosen_responses_and_episodes_of_each_step(golden: Golden) -> None:
    columns = {
        step: {name: unpack(column) for name, column in record.items() if isinstance(column, dict)}
        for step, record in records(golden.folder, "columns").items()
    }
    metrics = read_metrics(golden.folder)
    assert list(columns) == list(range(1, STEPS + 1))
    (start,) = read_events(golden.folder)
    assert start["kind"] == "start"
    assert start["config"]["trainer"]["record_mb"] == 2.0
    if not isinstance(golden.loop, Text):
        for step, record in records(golden.folder, "episodes").items():
            assert columns[step]["length"].sum() == 4 * 16  # environments, and steps of each
            assert step > 1 or ((columns[step]["seed"] >= 0) == (columns[step]["first"] == 0)).all()
            for row in record["rows"]:
                assert set(row["values"]) == STEP_VALUES
                steps = len(unpack(row["values"]["rewards"]))
                assert unpack(row["values"]["rewards"]).sum() == columns[step]["return"][row["segment"]]
                assert len(unpack(row["actions"])) == steps
                assert len(unpack(row["observations"]["state"])) in (steps, steps + 1)
        return
    for step, record in records(golden.folder, "tokens").items():
        np.testing.assert_allclose(columns[step]["reward"].mean(), metrics[step]["critic/score/mean"], rtol=1e-6)
        np.testing.assert_allclose(columns[step]["gradient_share"].sum(), 1, rtol=1e-5)
        assert len(columns[step]["reward_seconds"]) == len(columns[step]["reward"])
        longest = metrics[step]["reward/call_s/p99"]
        np.testing.assert_allclose(columns[step]["reward_seconds"].max(), longest, rtol=1e-5)
        reasons = {reason for row in record["rows"] for reason in row["reasons"]}
        assert {"best", "worst", "median", "largest ratio", "largest mismatch"} <= reasons
        texts = records(golden.folder, "texts")[step]
        for row in record["rows"]:
            assert set(row["values"]) == TOKEN_VALUES
            length = columns[step]["length"][row["row"]]
            assert {len(unpack(column)) for column in (row["mask"], row["response_ids"], *row["values"].values())} == {
                length
            }
            assert len(row["pieces"]) == length
            assert "".join(row["pieces"]) == row["response"]
            of_tokens = {name: unpack(column) for name, column in row["values"].items()}
            moved = of_tokens["advantages"] * (of_tokens["new_log_probs"] - of_tokens["old_log_probs"])
            moved = moved[unpack(row["mask"])].sum()
            np.testing.assert_allclose(columns[step]["moved"][row["row"]], moved, atol=1e-5)
            assert str(columns[step]["group"][row["row"]]) in texts["prompts"]
            assert "digits" in texts["rows"][row["row"]]["extra"]


def test_records_stay_within_their_budget_and_name_what_is_left_out(golden: Golden, tmp_path: Path) -> None:
    golden.train(tmp_path / "small", "trainer.record_mb=0.003", "trainer.total_training_steps=1", "trainer.save_freq=0")
    kind = "tokens" if isinstance(golden.loop, Text) else "episodes"
    assert records(tmp_path / "small", kind)[1]["left_out"] > 0
    assert (tmp_path / "small" / RECORDS_FILE).stat().st_size < 2 * 3000  # besides the columns of all rows


def test_a_record_file_survives_crashes_resumes_and_failures(tmp_path: Path) -> None:
    """A resumed run cuts later steps, and what a crash left incomplete; an error ends recording with a warning."""
    recorder = RecordFile(tmp_path, 1000, None)
    array = np.array([[1.5, -np.inf]], dtype=np.float32)
    for step in (1, 2, 3):
        with recorder.recording(step) as add:
            size = add("columns", {"array": pack(array), "text": "\ud800 \u2028 é"})
            add("empty", {})
    file = tmp_path / RECORDS_FILE
    written = file.read_bytes()
    assert [(head.step, head.kind) for head in heads(file)] == [(s, k) for s in (1, 2, 3) for k in ("columns", "empty")]
    assert next(json.loads(line)["bytes"] for line in written.splitlines()) == size
    assert unpack(read_record(file, next(heads(file)))["array"]).tobytes() == array.tobytes()
    file.write_bytes(written[:-5])
    assert len(list(heads(file))) == 5
    resumed = RecordFile(tmp_path, 1000, 2)
    assert [head.step for head in heads(file)] == [1, 1, 2, 2]
    with resumed.recording(3) as add:
        add("empty", {})
    assert [head.step for head in heads(file)] == [1, 1, 2, 2, 3]
    with resumed.recording(4) as add:
        add("columns", {"array": pack(array)})
        raise OSError(28, "No space left on device")
    assert not resumed.is_due
    assert [head.step for head in heads(file)] == [1, 1, 2, 2, 3]
    fresh = RecordFile(tmp_path, 1000, None)
    assert not file.exists()
    for step in range(1, FREE_STEPS + 1):
        assert fresh.is_due, "the first steps are recorded whatever they cost"
        with fresh.recording(step) as add:
            add("empty", {})
        fresh.seconds = 1e6
    assert not fresh.is_due, "more than 1 % of the time of the run so far"
    fresh.seconds = 0.0
    assert fresh.is_due
    assert (tmp_path / f"{RECORDS_FILE}.1").exists()
