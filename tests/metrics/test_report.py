"""The report at the end of a run, from the files in its folder."""

import io
import json
from dataclasses import replace
from pathlib import Path

from tether.commands.report import PROMPT_TAIL, command_to_resume, how_it_stopped, next_commands, show_report
from tether.commands.result import read_result
from tether.config import load_config
from tether.metrics.loggers import METRICS_FILE, SAMPLES_FILE
from tether.runtime.terminal import Screen


def test_scores_stand_beside_the_questions_and_the_most_frequent_answer(tmp_path: Path) -> None:
    def line(step: int, score: float) -> str:
        aux = {"num_distinct": 30.0, "majority_answer": 0.125}
        metrics = {f"val-aux/my/sums/{name}": value for name, value in aux.items()}
        return json.dumps({"step": step, "val-core/my/sums/reward/mean@1": score, **metrics})

    (tmp_path / "metrics.jsonl").write_text(f"{line(0, 0.25)}\n{line(4, 0.75)}\n")
    said = Screen(file=io.StringIO(), width=200)
    show_report(tmp_path, said, "tether train")
    text = said.file.getvalue()  # type: ignore[attr-defined]
    for shown in ("30 distinct", "0.250", "0.750", "+0.500", "most frequent answer", "0.125"):
        assert shown in text


def test_a_test_before_the_first_step_alone_is_one_column(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "val-core/my/sums/reward/mean@1": 0.25}) + "\n")
    said = Screen(file=io.StringIO(), width=200)
    show_report(tmp_path, said, "tether train")
    text = said.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("step 0") == 1
    assert text.count("0.250") == 1
    assert "change" not in text
    assert "best" not in text


def test_a_prompt_that_is_cut_says_so(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).touch()
    common = {"data_source": "my/sums", "ground_truth": "4", "response": "4", "reward": 1.0}
    prompts = ["2+2?", f"system{'.' * (PROMPT_TAIL - 4)}"]
    samples = [{"step": s, "index": i, "prompt": p, **common} for s in (0, 2) for i, p in enumerate(prompts)]
    (tmp_path / SAMPLES_FILE).write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    said = Screen(file=io.StringIO(), width=300)
    show_report(tmp_path, said, "tether train")
    text = said.file.getvalue()  # type: ignore[attr-defined]
    assert " 2+2? " in text
    assert " …stem..." in text


def test_a_run_that_is_stopped_before_its_first_checkpoint_names_no_command_above(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).touch()
    result = read_result(tmp_path, step=0, total_steps=4, stopped_by="SIGTERM")
    said = "stopped by SIGTERM after step 0 of 4; no step was saved: the same command starts from the beginning"
    assert how_it_stopped(result) == said
    saved = replace(result, step=2, checkpoint=tmp_path / "global_step_2")
    assert how_it_stopped(saved) == "stopped by SIGTERM after step 2 of 4; the command above resumes"


def test_what_is_suggested_fits_the_kind_of_policy(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    assert any("tether play" in line for line in next_commands(tmp_path, "tether train"))
    (tmp_path / "run.yaml").write_text("env: {train: {id: Pong-v5, env_type: envpool}}")  # which shows no pictures
    assert not any("tether play" in line for line in next_commands(tmp_path, "tether train"))
    (tmp_path / "actor" / "config.json").touch()
    assert any("tether generate" in line for line in next_commands(tmp_path, "tether train"))
    spaced = tmp_path / "my runs"
    (spaced / "actor").mkdir(parents=True)
    (spaced / "actor/config.json").touch()
    assert f"tether generate '{spaced}' " in "".join(next_commands(spaced, "tether train"))


def test_the_command_that_resumes_names_no_key_twice() -> None:
    given = ["trainer.total_training_steps=2", "trainer.resume_mode=disable"]
    files = ["data.train_files=a b.jsonl", "actor_rollout_ref.model.path=model"]
    loaded = load_config(None, [*files, *given])
    command = f"tether train run.yaml 'data.train_files=a b.jsonl' {' '.join(given)} +trainer.total_training_steps=2"
    assert command_to_resume(command, loaded, 2, 2) == (
        "tether train run.yaml 'data.train_files=a b.jsonl' trainer.resume_mode=auto '~trainer.resume_from_path' "
        "trainer.total_training_steps=4"
    )
