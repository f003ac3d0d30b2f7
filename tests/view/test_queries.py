"""Questions about a run, answered without a browser."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.runs.golden import Golden
from tests.runs.loops import Text
from tests.view.planted import healthy, text_config, write_text
from tether.checkpoints import CheckpointStore
from tether.commands.cli import app
from tether.loop.parts import Rollbacks
from tether.metrics.loggers.jsonl import DISCARDED_FILE, EVENTS_FILE, METRICS_FILE, JsonlLogger, read_events
from tether.metrics.loggers.protocol import RunInfo
from tether.metrics.records import RecordFile, pack, unpack
from tether.view import queries
from tether.view.alternatives import request_of
from tether.view.compare import comparison, experiments, mean_curves, verdict
from tether.view.export import write_page
from tether.view.expression import matching
from tether.view.rescoring import Rescoring, prepare
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
        columns = run.columns(2)
        for group in queries.groups(run, 2):
            np.testing.assert_allclose(group["moved"], columns["moved"][group["rows"]].sum(), rtol=1e-5)
    else:
        row = next(row["row"] for row in queries.samples(run, step=2)["rows"] if row["recorded"])
        first = queries.episode(run, 2, row)
        assert len(first["values"]["td_error"]) == first["length"]
        assert first["film"] is None
        assert "env.eval.video_cfg.save_video=True films evaluations" in first["no_film"]
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


def test_episodes_have_success_seed_and_task(golden: Golden, planted: Path) -> None:
    robot = str(planted / "robot")
    rows = ask(robot, "--step", "20", "--where", "success and seed >= 0 or task == 0")["rows"]
    assert [(row["row"], row["success"], row["seed"], row["task"]) for row in rows] == [
        (0, False, 20, "walk"), (2, False, 20, "walk")
    ]  # fmt: skip
    one = ask(robot, "--step", "20", "--sample", "0")
    assert (one["success"], one["seed"], one["task"]) == (False, 20, "walk")
    assert ask(robot, "--step", "20", "--sort", "seed", "--limit", "1")["rows"][0]["seed"] is None
    worst, best = ask(robot, "--tasks")
    assert (worst["task"], worst["recent"], set(worst["values"]), worst["episodes"]) == ("walk", 0.0, {0.0}, 60)
    assert (best["task"], best["recent"]) == ("stand up", 1.0)
    assert best["low"][0] < best["values"][0] == best["high"][0] == 1
    assert "--tasks: " in refusal(str(planted / "never"), "--tasks", "--json")
    assert "--limit: does not apply to --tasks" in refusal(robot, "--tasks", "--limit", "3", "--json")
    if not isinstance(golden.loop, Text):  # CartPole reports no success, and its first episodes have the seeds
        listed = queries.samples(RunFolder(golden.folder), step=1)
        assert list(listed["not_recorded"]) == ["success"]
        assert [row["seed"] is not None for row in listed["rows"]] == [row["first"] == 0 for row in listed["rows"]]
        assert queries.tasks(RunFolder(golden.folder)) == []


def test_alternatives_are_those_of_the_checkpoint_that_sampled(golden: Golden, planted: Path) -> None:
    """The log-probs of the tokens are those of the sampler; without a checkpoint it is said what is missing."""
    message = "has no checkpoint, from which alternatives are computed; trainer.save_freq saves them"
    row = str(RunFolder(planted / "never").record("tokens", 40)["rows"][0]["row"])
    assert message in refusal(str(planted / "never"), "--step", "40", "--sample", row, "--token", "3", "--json")
    assert "--token: name its step and sample" in refusal(str(planted / "never"), "--token", "3", "--json")
    if not isinstance(golden.loop, Text):
        return
    from tether.commands.likely_tokens import likely_tokens, load
    from tether.text.models.load import load_tokenizer

    run = RunFolder(golden.folder)
    recorded = run.record("tokens", 3)["rows"][0]
    request = request_of(run, 3, recorded["row"])
    assert request.pop("checkpoint") == 2
    dtype, folder, reference = request.pop("dtype"), Path(request.pop("model")), request.pop("reference")
    tokens = list(likely_tokens(load(folder, dtype), load(reference, dtype), load_tokenizer(folder), **request))
    sampled = unpack(recorded["values"]["sampler_log_probs"])
    np.testing.assert_allclose([one["log_prob"] for one in tokens], sampled, atol=1e-4)
    for one, id in zip(tokens, request["response_ids"], strict=True):
        assert one["log_probs"] == sorted(one["log_probs"], reverse=True)
        assert len(one["ids"]) == len(one["texts"]) == request["count"]
        assert one["rank"] > len(one["ids"]) or one["ids"][one["rank"] - 1] == id
    rated = [one["reference_log_prob"] for one in tokens]
    np.testing.assert_allclose(rated, unpack(recorded["values"]["ref_log_probs"]), atol=1e-4)
    assert request_of(run, 1, run.record("tokens", 1)["rows"][0]["row"])["checkpoint"] == 2


NEW_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, weight=1.0):
    print("called")
    if extra_info["index"] == FAILING:
        raise KeyError("no such answer")
    if extra_info["index"] == ABSTAINING:
        return None
    return {"score": len(solution_str), "reason": "long", "ratio": float("nan")}
"""


def test_responses_are_scored_again_beside_their_recorded_scores(golden: Golden, inputs: Path, tmp_path: Path) -> None:
    run, chosen = RunFolder(golden.folder), (str(golden.folder), "--step", "1", "--rescore", "--json")
    if not isinstance(golden.loop, Text):
        assert "is a run in a simulator, whose rewards" in refusal(*chosen)
        assert "is a run in a simulator" in refusal(*chosen, "--sample", "0")
        return
    from tether.commands.rescore import rescore

    def score_again(prepared: Rescoring, **changes: object) -> dict[str, Any]:
        values, folder, reward, responses = prepared.request.values()
        return prepared.compare(rescore(values | changes, Path(folder), reward, responses))

    rows = queries.samples(run, step=1, limit=100)["rows"]
    with pytest.raises(ValueError, match=r"object:letters: was an object of the program that .*FILE\.py:NAME"):
        score_again(prepare(run, rows, None))
    same = score_again(prepare(run, rows, f"{inputs / 'reward.py'}:compute_score"))
    assert (same["changed"], same["left_out"], len(same["rows"])) == (0, [], len(rows))
    for row, again in zip(rows, same["rows"], strict=True):
        assert again["recorded"] == {"score": row["reward"], "extra": row["extra"], "error": None}
        assert again["now"]["score"] == pytest.approx(row["reward"])
        assert again["now"]["extra"] == row["extra"]
        assert (again["same_score"], again["warnings"]) == (True, [])
    # Of some only the beginning is recorded: their text is that of their token ids, and without those it is unknown.
    by_token = {one["row"] for one in run.record("tokens", 1)["rows"]}
    cut = [row | {"response": "", "cut": 9} for row in rows]
    unknown = [row for row in cut if row["row"] not in by_token]
    assert [one["row"] for one in prepare(run, cut, None).left_out] == [row["row"] for row in unknown] != []
    with pytest.raises(ValueError, match=r"only the beginning of its response was recorded; trainer\.record_mb"):
        prepare(run, unknown, None)
    failing, abstaining, changed, _ = sorted({row["index"] for row in rows})
    names = f"FAILING, ABSTAINING = {failing}, {abstaining}"
    (tmp_path / "new.py").write_text(f"{names}\n{NEW_REWARD}")
    data = (inputs / "train.jsonl").read_text().splitlines()
    data[changed] = data[changed].replace(f'"ground_truth": "{2 * changed}"', '"ground_truth": "wrong"')
    (tmp_path / "train.jsonl").write_text("\n".join(data))
    files = run.config["data"] | {"train_files": [str(tmp_path / "train.jsonl")]}
    mixed = [(cut if row["row"] in by_token else rows)[row["row"]] for row in rows]
    again = score_again(prepare(run, mixed, f"{tmp_path / 'new.py'}:compute_score"), data=files)["rows"]
    for row, one in zip(rows, again, strict=True):
        has_score, failed = row["index"] not in (failing, abstaining), row["index"] == failing
        assert one["now"]["score"] == (len(row["response"]) if has_score else None)
        assert one["now"]["extra"] == ({"reason": "long", "ratio": None} if has_score else {})
        assert ("no such answer" in str(one["now"]["error"]), bool(one["now"]["traceback"])) == (failed, failed)
        place = f"{tmp_path / 'train.jsonl'} row {changed}"
        warning = f"{place} has another expected answer now than the one that was recorded: 'wrong'"
        assert one["warnings"] == ([warning] if row["index"] == changed else [])
    rollout = run.config["actor_rollout_ref"]["rollout"] | {"multi_turn": {"enable": True}}
    secret = {"path": "reward.py", "reward_kwargs": {"api_key": "***"}}
    for key, changed, message in (
        ("actor_rollout_ref", run.config["actor_rollout_ref"] | {"rollout": rollout}, "in several turns cannot be"),
        ("custom_reward_function", secret, "custom_reward_function: has a secret, which a run does not record"),
        ("critic", {"no_such_key": 1}, "this version of tether cannot read its configuration"),
    ):
        with pytest.raises(ValueError, match=message):
            score_again(prepare(run, rows, None), **{key: changed})
    assert "--reward new.py: name a function of a file: FILE.py:NAME" in refusal(*chosen, "--reward", "new.py")
    assert "--reward: is for --rescore and for the page" in refusal(*chosen[:3], "--json", "--reward", "new.py:score")
    assert "--token: does not apply to --rescore" in refusal(*chosen, "--sample", "0", "--token", "1")


@pytest.mark.slow
def test_alternatives_are_computed_in_a_process_of_their_own(golden: Golden, tmp_path: Path) -> None:
    if not isinstance(golden.loop, Text):
        pytest.skip("a run of a language model")
    row = str(RunFolder(golden.folder).record("tokens", 3)["rows"][0]["row"])
    chosen = (str(golden.folder), "--step", "3", "--sample", row, "--token")
    one = ask(*chosen, "1")
    started_from = RunFolder(golden.folder).setting("actor_rollout_ref.model.path")
    source = "Recomputed from the checkpoint of step 2, at temperature 1"
    assert one["source"] == f"{source}. The reference is {started_from}."
    assert one["token"] == 1
    assert len(one["ids"]) == len(one["reference_log_probs"]) == 8
    assert "the response has the tokens 0 to" in refusal(*chosen, "1000", "--json")
    broken = tmp_path / "run"
    shutil.copytree(golden.folder, broken)
    # A run whose first model is on another machine.
    events = broken / "events.jsonl"
    events.write_text(events.read_text().replace(started_from, "/elsewhere/model"))
    elsewhere = ask(str(broken), *chosen[1:], "1")
    assert "Without the reference: " in elsewhere["source"]
    assert "reference_log_probs" not in elsewhere
    (broken / "global_step_2" / "actor" / "config.json").write_text("{")
    assert "config.json" in refusal(str(broken), *chosen[1:], "1", "--json")


@pytest.mark.slow
def test_responses_are_scored_again_in_a_process_of_their_own(golden: Golden, tmp_path: Path) -> None:
    if not isinstance(golden.loop, Text):
        pytest.skip("a run of a language model")
    (tmp_path / "new.py").write_text(f"FAILING, ABSTAINING = -1, -1\n{NEW_REWARD}")
    chosen = (str(golden.folder), "--step", "3", "--rescore", "--sample", "2")
    answer = ask(*chosen, "--reward", f"{tmp_path / 'new.py'}:compute_score")
    sample = queries.sample(RunFolder(golden.folder), 3, 2)
    (one,) = answer["rows"]
    assert (one["recorded"]["score"], one["now"]["score"]) == (sample["reward"], len(sample["response"]))
    assert (answer["changed"], one["same_score"], one["now"]["extra"]["reason"]) == (1, False, "long")
    assert "new.py has no such function" in refusal(*chosen, "--reward", f"{tmp_path / 'new.py'}:score", "--json")
    assert "object:letters: was an object" in refusal(*chosen, "--json")


def test_runs_are_compared_with_what_their_seeds_can_tell(planted: Path, tmp_path: Path) -> None:
    runs = [RunFolder(folder) for folder in find_runs([planted / "compared"])]
    compared = comparison(runs)
    assert [row["key"] for row in compared["differences"]] == ["actor_rollout_ref.actor.optim.lr"]
    assert experiments(runs) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    (told,) = compared["verdicts"]
    assert told["differ"]
    assert "lr=3e-05, 4 seeds is better" in told["text"]
    assert compared["experiments"][0] == {
        "label": "lr=1e-05, 4 seeds", "runs": [0, 1, 2, 3], "members": ["a_0", "a_1", "a_2", "a_3"]
    }  # fmt: skip
    assert [row["by_experiment"] for row in compared["differences"]] == [["1e-05", "3e-05"]]
    assert compared["warnings"] == []
    shutil.copytree(runs[0].folder, tmp_path / "other")
    events = tmp_path / "other" / EVENTS_FILE
    code = read_events(runs[0].folder)[0]["code"]
    events.write_text(events.read_text().replace(json.dumps(code), '"0123456789ab"', 1))
    (row,) = comparison([runs[0], RunFolder(tmp_path / "other")])["differences"]
    assert (row["key"], row["values"][1].split()[-1]) == ("(code)", "0123456789ab")
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


def test_what_happens_to_a_run_is_marked_at_its_step(tmp_path: Path) -> None:
    logger = JsonlLogger(RunInfo(tmp_path, "planted", "run", text_config(), 9))
    warnings = {
        "oom": "a micro-batch did not fit into memory; it was split, with the same result",
        "restart": "http://127.0.0.1:8000 died: exit code 1. It is restarted",
        "rollback": "trainer.on_collapse=rollback: the run goes back to global_step_2",
        "alarm": "the entropy fell below 0.01",
    }
    counted = {
        "transfer/server_failures": "restart", "reward/excluded_rows": "dropped",
        "training/rollout_mismatch_alarm": "alarm", "timing_s/save_checkpoint": "checkpoint",
    }  # fmt: skip
    expected = []
    for step, (kind, text) in enumerate(warnings.items(), start=1):
        logger.log(step, {"critic/score/mean": 0.0})
        logger.keep_warning(text)  # of the step after the last one that was logged
        expected.append((step + 1, kind))
    for step, (key, kind) in enumerate(counted.items(), start=5):
        logger.log(step, {key: 1.0})
        expected.append((step, kind))
    logger.close()
    assert [(mark["step"], mark["kind"]) for mark in queries.marks(RunFolder(tmp_path))] == sorted(expected)


def record(recorder: RecordFile, step: int, response: str) -> None:
    with recorder.recording(step) as add:
        columns = {name: np.zeros(1, dtype=np.int32) for name in ("index", "group", "reward", "length")}
        add("columns", {name: pack(column) for name, column in columns.items()})
        add("tokens", {"rows": [], "left_out": 0})
        add("texts", {"prompts": {}, "rows": [{"response": response}]})


def test_steps_that_a_resumed_run_repeats_replace_those_that_were_shown(tmp_path: Path) -> None:
    """Twice a run resumes from an earlier step, while it is open; its records have the same sizes as before."""
    logger = JsonlLogger(RunInfo(tmp_path, "planted", "run", text_config(), 9))
    recorder = RecordFile(tmp_path, 10_000, None)
    opened: list[RunFolder] = []
    for resumed_step, letter in ((None, "a"), (2, "b"), (5, "c")):
        if resumed_step is not None:
            logger.close()
            logger = JsonlLogger(RunInfo(tmp_path, "planted", "run", text_config(), 9, resumed_step=resumed_step))
            recorder = RecordFile(tmp_path, 10_000, resumed_step)
        for step in range((resumed_step or 0) + 1, {"a": 5, "b": 8, "c": 10}[letter]):
            logger.log(step, {"critic/score/mean": float(ord(letter))})
            record(recorder, step, f"{letter} says {step}")
        opened.append(RunFolder(tmp_path))
        for run in opened:
            run.refresh()
            shown = {step: queries.sample(run, step, 0)["response"] for step in run.steps}
            assert shown == queries_of(tmp_path)
    logger.close()
    assert shown == {
        1: "a says 1", 2: "a says 2", 3: "b says 3", 4: "b says 4", 5: "b says 5",
        6: "c says 6", 7: "c says 7", 8: "c says 8", 9: "c says 9",
    }  # fmt: skip
    for run in opened:
        assert run.metrics.keys() == shown.keys()
        curve = queries.curves(run, ["critic/score/mean"])["critic/score/mean"]
        assert curve["y"] == [float(ord(text[0])) for text in shown.values()]
        assert curve["discarded"] == [{"x": [3, 4], "y": [97.0] * 2}, {"x": [6, 7], "y": [98.0] * 2}]
        spans = [(m["step"], m["until"]) for m in queries.marks(run) if m["kind"] == "discarded"]
        assert spans == [(3, 4), (6, 7)]
    JsonlLogger(RunInfo(tmp_path, "planted", "run", text_config(), 9)).close()
    assert RunFolder(tmp_path).discarded == [], "a fresh run has no branches of an earlier one"


def queries_of(folder: Path) -> dict[int, str]:
    """The responses of a folder that was not open before."""
    run = RunFolder(folder)
    return {step: run.record("texts", step)["rows"][0]["response"] for step in run.steps}


def test_a_run_that_rolled_back_is_still_a_seed_of_its_experiment(tmp_path: Path) -> None:
    """A rollback lowers the learning rate, which nobody chose; a rate that somebody chose makes another experiment."""

    def write(seed: int, rates: list[float], message: str) -> RunFolder:
        folder = tmp_path / str(seed)
        folder.mkdir()
        for number, rate in enumerate(rates):
            config = text_config(actor_rollout_ref__actor__optim__lr=rate, trainer__seed=seed)
            config["trainer"]["rollback_lr_factor"] = 0.5
            info = RunInfo(folder, "planted", folder.name, config, 9, resumed_step=2 if number else None)
            logger = JsonlLogger(info)
            logger.log(3, {"critic/score/mean": 0.5})
            logger.keep_warning(message)
            logger.close()
        return RunFolder(folder)

    rollback = Rollbacks(CheckpointStore(tmp_path), 3, [], 0.5).message(tmp_path / "global_step_2", 3)
    runs = [
        write(1, [1e-3], "nothing"),
        write(2, [1e-3, 5e-4], rollback),
        write(3, [1e-3, 5e-4, 2.5e-4], rollback),
        write(4, [1e-3, 5e-4], "nothing"),
        write(5, [1e-3, 1e-4], rollback),
    ]
    assert experiments(runs) == [[0, 1, 2], [3], [4]]
    (rates,) = [row for row in comparison(runs)["differences"] if row["key"].endswith("lr")]
    assert rates["values"] == [1e-3, 1e-3, 1e-3, 5e-4, 1e-4]


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
