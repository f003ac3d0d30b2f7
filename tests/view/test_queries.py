"""Questions about a run, answered without a browser."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.runs.golden import Golden
from tests.runs.loops import Text
from tests.view.planted import healthy, text_config, write_text
from tether.commands.cli import app
from tether.metrics.loggers.jsonl import DISCARDED_FILE, METRICS_FILE, JsonlLogger
from tether.metrics.loggers.protocol import RunInfo
from tether.metrics.records import RecordFile, pack, unpack
from tether.view import queries
from tether.view.compare import comparison, experiments, mean_curves, verdict
from tether.view.export import write_page
from tether.view.expression import matching
from tether.view.run import RunFolder, find_runs


def ask(*arguments: str) -> object:
    done = CliRunner().invoke(app, ["view", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refusal(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["view", *arguments])
    assert done.exit_code
    return str(done.exception)


def test_any_run_opens_and_names_what_it_did_not_record(golden: Golden, tmp_path: Path) -> None:
    """Panels of its kind, all of its metrics explained, and the values that were stored."""
    run = RunFolder(golden.folder)
    shown = queries.overview(run)
    assert shown["kind"] == ("text" if isinstance(golden.loop, Text) else "control")
    assert len(shown["panels"]) == 6
    assert shown["metrics"].keys() == set(run.keys)
    assert all(one["meaning"] for one in shown["metrics"].values())
    assert {mark["kind"] for mark in shown["marks"]} >= {"checkpoint"}
    curve = queries.curves(run, ["timing_s/step"])["timing_s/step"]
    assert curve["y"] == [run.metrics[step]["timing_s/step"] for step in curve["step"]]
    if shown["kind"] == "text":
        one = queries.sample(run, 2, queries.samples(run, step=2, sort="-reward")["rows"][0]["row"])
        raw = next(row for row in run.record("tokens", 2)["rows"] if row["row"] == one["row"])
        assert one["tokens"]["values"]["advantages"] == unpack(raw["values"]["advantages"]).tolist()
        assert one["tokens"]["ids"] == unpack(raw["response_ids"]).tolist()
    else:
        row = next(row["row"] for row in queries.samples(run, step=2)["rows"] if row["recorded"])
        first = queries.episode(run, 2, row)
        assert len(first["values"]["td_error"]) == first["length"]
    older = tmp_path / "older"  # of a version that recorded nothing
    older.mkdir()
    (older / METRICS_FILE).write_bytes((golden.folder / METRICS_FILE).read_bytes())
    assert "trainer.record_mb" in " ".join(queries.overview(RunFolder(older))["missing"].values())
    for runs in ([run], [RunFolder(older)], [run, RunFolder(older)]):
        assert "opens without a server" in write_page(runs, tmp_path / "page.html")


def test_samples_are_sorted_filtered_and_searched(planted: Path) -> None:
    run = str(planted / "never")
    rows = ask(run, "--step", "40", "--sort", "-length", "--limit", "5")["rows"]
    lengths = [row["length"] for row in rows]
    assert lengths == sorted(lengths, reverse=True)
    assert len(rows) == 5
    failed = ask(run, "--where", "reward==0 and length>70 and not truncated", "--limit", "500")
    assert failed["total"] == len(failed["rows"]) > 20
    assert all(row["reward"] == 0 and row["length"] > 70 for row in failed["rows"])
    found = ask(run, "--search", "answer is 4.", "--where", "index == 2", "--step", "7")
    assert {row["index"] for row in found["rows"]} == {2}
    assert ask(run, "--search", "no such text")["total"] == 0
    everything = ask(run, "--limit", "100000")
    assert everything["total"] == everything["shown"] == len(everything["rows"]) == 3200
    some = CliRunner().invoke(app, ["view", run, "--sort", "reward", "--json"])
    assert json.loads(some.stdout)["shown"] == 20
    assert "20 of 3200 samples; --limit 3200 prints all of them" in some.stderr
    for arguments, message in {
        ("--where", "lenght>3"): "Did you mean length?",
        ("--where", "__import__('os')"): "not understood",
        ("--where", "length >"): "write for example",
        ("--sort", "size"): "no such column",
        ("--step", "1000"): "nearest recorded step is 100",
        (
            "--key",
            "critic/scores/mean",
        ): "no such metric in never: 'critic/scores/mean'. Did you mean critic/score/mean?",
        ("--key", "critic/score/mean", "--limit", "3"): "--limit: does not apply to --key",
        ("--prompts", "--step", "3"): "--step: does not apply to --prompts",
        ("--step", "3", "--sample", "2", "--sort", "reward"): "--sort: does not apply to --sample",
    }.items():
        assert message in refusal(run, "--json", *arguments)
    assert "--limit: is for --json" in refusal(run, "--limit", "3")
    assert "--limit: is asked of one run" in refusal(str(planted / "compared"), "--limit", "3", "--json")


def test_a_run_that_two_paths_lead_to_is_one_run(planted: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(planted / "compared")
    folders = find_runs([planted / "compared", tmp_path / "link", planted / "compared" / "a_0"])
    assert folders == find_runs([planted / "compared"])
    assert len(folders) == 8


def test_filters_carry_out_comparisons_only() -> None:
    columns = {"reward": np.array([0, 1, math.nan]), "part/acc": np.array([0.5, 0.0, 1.0])}
    assert matching("reward == 0 or part/acc > 0.9", columns, 3).tolist() == [True, False, True]
    assert matching("0 < part/acc < 0.9 and not isnan(reward)", columns, 3).tolist() == [True, False, False]
    assert matching("abs(-part/acc) * 2 >= 1", columns, 3).tolist() == [True, False, True]
    for hostile in (
        "reward.__class__",
        "[x for x in (1,)]",
        "(lambda: 1)()",
        "reward if 1 else 2",
        "'a'",
        "reward in (1,)",
    ):
        with pytest.raises(ValueError, match="not understood"):
            matching(hostile, columns, 3)


def test_groups_prompts_and_parts_of_the_reward(planted: Path) -> None:
    run = RunFolder(planted / "never")
    listed = ask(str(run.folder), "--prompts", "--limit", "3")
    assert [one["index"] for one in listed["rows"]][:2] == listed["never"] == [3, 6]
    assert (listed["total"], len(listed["rows"])) == (8, 3)
    assert listed["solved_means"] == "acc above 0.5, a part of the reward"
    shares = [one["solved"] / one["attempts"] for one in queries.prompts(run)["rows"]]
    assert shares == sorted(shares)
    assert shares[:2] == [0, 0]
    critic = queries.prompts(RunFolder(planted / "hacked"))
    assert not critic["never"]
    assert all(one["solved"] < one["attempts"] / 2 for one in critic["rows"]), "politeness solves no prompt"
    listed = queries.groups(run, 50)
    assert sum(one["gradient_share"] for one in listed) == pytest.approx(1, abs=1e-5)
    assert next(one for one in listed if one["group"] == 3)["without_variance"]
    assert len(queries.group(run, 50, 3)["rows"]) == 4
    lengths = run.columns(50)["length"]
    spread = {one["name"]: one for one in queries.distributions(run, 50)}
    assert list(spread) == ["reward", "length", "ratio", "advantage"]
    assert sum(spread["length"]["counts"]) == len(lengths)
    assert (spread["length"]["lowest"], spread["length"]["median"]) == (lengths.min(), np.median(lengths))
    assert [one["name"] for one in queries.distributions(RunFolder(planted / "robot"), 3)] == ["return", "length"]
    assert len(queries.prompt_history(run, 3)["training"]) == 400
    hacked = {one["name"]: one["means"] for one in queries.parts(RunFolder(planted / "hacked"))}
    assert hacked["politeness"][-1] > hacked["politeness"][0] + 0.5
    low, high = queries.binomial(0.5, 100)
    assert (round(low, 3), round(high, 3)) == (0.404, 0.596)  # Wilson's interval of 50 of 100
    curve = queries.curves(run, ["val-core/math/acc/mean@1"])["val-core/math/acc/mean@1"]
    assert all(low <= y <= high for low, y, high in zip(curve["low"], curve["y"], curve["high"], strict=True))


def test_runs_are_compared_with_what_their_seeds_can_tell(planted: Path) -> None:
    runs = [RunFolder(folder) for folder in find_runs([planted / "compared"])]
    compared = comparison(runs)
    assert [row["key"] for row in compared["differences"]] == ["actor_rollout_ref.actor.optim.lr", "trainer.seed"]
    assert experiments(runs) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    (told,) = compared["verdicts"]
    assert told["differ"]
    assert "lr=3e-05, 4 seeds is better" in told["text"]
    assert compared["experiments"][0] == {
        "label": "lr=1e-05, 4 seeds", "runs": [0, 1, 2, 3], "members": ["a_0", "a_1", "a_2", "a_3"]
    }  # fmt: skip
    assert [row["by_experiment"] for row in compared["differences"]] == [["1e-05", "3e-05"], ["0, 1, 2, 3"] * 2]
    assert compared["warnings"] == []
    for axis in queries.AXES:
        curves = mean_curves(runs, "critic/score/mean", axis)
        assert [curve["n"] for curve in curves] == [4, 4]
        assert all(curve["x"] == sorted(curve["x"]) for curve in curves)
    one_each = comparison([runs[0], runs[4]])["verdicts"][0]
    assert not one_each["differ"]
    assert "No difference can be told from these seeds" in one_each["text"]
    rng, names = np.random.default_rng(0), ("a", "b")
    draws = [verdict(rng.normal(0.5, 0.1, 4), rng.normal(0.5, 0.1, 4), names, "score") for _ in range(100)]
    assert sum("No difference can be told" in one["text"] for one in draws) >= 95
    shown = CliRunner().invoke(app, ["runs", str(planted), "--json"])
    assert {Path(run["name"]).name for run in json.loads(shown.stdout)} >= {"fell", "robot", "a_0"}
    table = CliRunner().invoke(app, ["compare", str(planted / "compared")])
    assert "lr=3e-05, 4 seeds is better" in table.stdout


def test_runs_of_equal_configuration_and_seed_count_once_and_are_named(planted: Path) -> None:
    """A folder of unrelated runs, of which five share configuration and seed."""
    folders = find_runs([planted])
    runs = [RunFolder(folder) for folder in folders]
    compared = comparison(runs)
    pooled = next(one for one in compared["experiments"] if len(one["runs"]) > 4)
    assert pooled["members"] == ["a_0", "a_1", "a_2", "a_3", "critic", "fell", "hacked", "never"]
    assert pooled["label"].endswith("8 runs of 4 seeds")
    assert "lr=1e-05" in pooled["label"]
    (warning,) = compared["warnings"]
    assert "8 runs of 4 seeds: 5 runs have seed 1 (a_1, critic, fell, hacked, never)" in warning
    told = next(one for one in compared["verdicts"] if "lr=3e-05, 4 seeds" in one["text"])
    assert "(n=4)" in told["text"]
    assert "(n=8)" not in told["text"]
    # The metric of a curve is offered whichever runs have it.
    assert {"critic/score/mean", "env/return", compared["key"]} <= set(compared["keys"])
    counts = [curve["n"] for curve in mean_curves(runs, "critic/score/mean")]
    assert sorted(counts) == [0, 4, 4]
    with pytest.raises(ValueError, match="Did you mean env/return"):
        mean_curves(runs, "env/returns")


def test_a_run_that_goes_on_resumes_and_is_rewritten_is_followed(tmp_path: Path) -> None:
    write_text(tmp_path / "run", steps=6)
    run = RunFolder(tmp_path / "run")
    version = run.version
    assert not run.refresh()
    info = RunInfo(tmp_path / "run", "planted", "run", text_config(), 6, resumed_step=4)
    logger, recorder = JsonlLogger(info), RecordFile(tmp_path / "run", 10_000, 4)
    assert run.refresh()
    assert run.version > version
    assert max(run.metrics) == max(run.steps) == 4
    logger.log(5, {"critic/score/mean": 0.5})
    with recorder.recording(5) as add:
        add("columns", {"reward": pack(np.zeros(1, dtype=np.float32))})
    logger.log(5, {"timing_s/save_checkpoint": 1.0})
    assert run.refresh()
    assert run.metrics[5] == {"critic/score/mean": 0.5, "timing_s/save_checkpoint": 1.0}
    assert run.steps[-1] == 5
    logger.keep_warning("trainer.on_collapse=rollback: the run goes back to step 4")
    logger.close()
    run.refresh()
    kinds = [mark["kind"] for mark in queries.marks(RunFolder(tmp_path / "run"))]
    assert {"resume", "rollback", "checkpoint", "discarded"} <= set(kinds)
    assert (tmp_path / "run" / DISCARDED_FILE).read_text().count("\n") == 2
    (tmp_path / "run" / METRICS_FILE).unlink()
    write_text(tmp_path / "other", steps=2)
    (tmp_path / "other" / METRICS_FILE).rename(tmp_path / "run" / METRICS_FILE)
    assert run.refresh()
    assert sorted(run.metrics) == [1, 2]


def test_a_long_run_opens_in_a_second_within_its_memory(tmp_path: Path) -> None:
    """1,000 steps of 256 samples: opened, filtered and searched, in a process without torch."""
    folder = tmp_path / "run"
    logger = JsonlLogger(RunInfo(folder, "planted", "run", text_config(), 1000))
    recorder = RecordFile(folder, 2_000_000, None)
    rng = np.random.default_rng(0)
    columns = {
        name: pack(rng.random(256).astype(np.float32)) for name in ("reward", "length", "index", "group", "entropy")
    }
    text = "".join(map(chr, rng.integers(97, 123, 500)))
    texts = {"prompts": {}, "rows": [{"response": text}] * 256}
    for step in range(1, 1001):
        logger._metrics._put((json.dumps({"step": step, **healthy(step, rng)}) + "\n").encode())
        with recorder.recording(step) as add:
            add("columns", columns)
            add("texts", texts | {"prompts": {"0": {"prompt": "needle" if step == 500 else "hay"}}})
    logger.close()
    code = f"""
import time, sys
from pathlib import Path
began = time.process_time()
from tether.view.run import RunFolder
from tether.view import queries, server
run = RunFolder(Path({str(folder)!r}))
queries.overview(run)
opened = time.process_time()
assert queries.samples(run, where="reward > 0.5", sort="-length", limit=5)["total"] > 100_000
assert run.steps_with_text("needle") == [500]
searched = time.process_time()
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(opened - began, searched - opened, peak, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    opened, searched, kibibytes, has_torch = done.stdout.split()
    assert has_torch == "False"
    assert int(kibibytes) < 300 * 1024
    assert float(opened) < 3, "far above the second that it takes on a quiet machine"
    assert float(searched) < 3
