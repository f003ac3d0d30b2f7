"""Stored rollouts, and a critic that is trained on them before a run."""

import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs.steps import first_step
from tests.runs.test_rollout_correction import recorded
from tests.runs.tiny_run import GAE, LIGHT, base_overrides, measured, rows, train, write_jsonl
from tests.tiny import tiny_tokenizer
from tether.algorithms import parse_rejection
from tether.batch import Prompt, TrainBatch
from tether.commands.cli import main
from tether.loop.parts import RolloutCorrection
from tether.metrics.loggers import LogFailed
from tether.metrics.loggers.jsonl import read_metrics
from tether.runtime.objects import register_objects
from tether.text.learning.collector import ScoredResponses
from tether.text.learning.critic_pretraining import split_by_prompt, value_batch
from tether.text.learning.rollout_files import RolloutFiles, StoredResponse, read_rollouts
from tether.text.rewards.outcome import Abstention, RewardReport, Score

STEPS = 3


def by_truth(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth), "length": len(solution_str)}


@pytest.fixture(scope="module")
def stored(inputs: Path, tmp_path_factory) -> Iterator[Path]:
    """The rollouts of a run whose policy hardly moves; prompts with b are worth 1, those with a nothing."""
    folder = tmp_path_factory.mktemp("stored")
    texts = [f"{letter * 8}{number}" for number in range(10) for letter in "ab"]
    prompts = [
        row | {"prompt": [{"role": "user", "content": text}]} for row, text in zip(rows(count=20), texts, strict=True)
    ]
    for number, row in enumerate(prompts):
        row["reward_model"] = {"style": "rule", "ground_truth": str(number % 2)}
    write_jsonl(folder / "train.jsonl", prompts)
    with register_objects({"letters": by_truth}):
        train([*by_prompt(inputs, folder, folder / "run"), f"trainer.rollout_data_dir={folder / 'rollouts'}"])
        yield folder / "rollouts"


def by_prompt(inputs: Path, folder: Path, run: Path) -> list[str]:
    """A run on the prompts and the reward in `folder`."""
    return [
        *base_overrides(inputs, run),
        *GAE,
        *LIGHT,
        f"data.train_files={folder / 'train.jsonl'}",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.rollout.n=4",
        f"trainer.total_training_steps={STEPS}",
    ]


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_a_step(stored: Path) -> None:
    assert sorted(path.name for path in stored.iterdir()) == [f"{step}.jsonl" for step in range(1, STEPS + 1)]
    found = records(stored / "1.jsonl")
    assert len(found) == 16
    scores = [record["score"] for record in found]
    logged = measured(stored.parent / "run")[1]
    assert sum(scores) / 16 == pytest.approx(logged["critic/score/mean"])
    for record in found:
        assert record["step"] == 1
        assert "<|im_start|>user" in record["input"]
        assert record["gts"] == str(record["index"] % 2)
        assert record["data_source"] == "tiny/sums"
        assert len(record["response_ids"]) == len(record["rewards"]) == len(record["response_mask"])
        assert isinstance(record["length"], int)
    # the first step's KL is nothing, up to rounding, so all of the reward is the score at the end
    assert found[0]["rewards"][-1] == pytest.approx(found[0]["score"], abs=1e-5)


def test_what_is_read_is_what_was_written(stored: Path) -> None:
    found = read_rollouts(stored)
    assert len(found) == STEPS * 16
    first = records(stored / "1.jsonl")[0]
    assert (found[0].prompt_ids, found[0].response_ids) == (first["prompt_ids"], first["response_ids"])


def rejected() -> tuple[ScoredResponses, TrainBatch]:
    """Return three responses: a rejected last token, a second one, and one without a score."""
    batch = recorded()
    prompt = Prompt((1,), "tiny", None)
    report = RewardReport([1.0, 0.5, math.nan], 2, 1, 0, (), {})
    outcomes = [Score(1.0, {"step": 9, "acc": 1}), Score(0.5), Abstention()]
    experience = ScoredResponses([prompt], batch, ["a", "b", "c"], outcomes, report, reward_seconds=0.0)
    RolloutCorrection(rejection=parse_rejection("token_k1", 3.0)).apply(batch)  # the first row's last token
    batch.token_level_rewards = batch.token_level_scores
    return experience, batch


def test_what_was_rejected_is_stored_as_such(tmp_path: Path) -> None:
    RolloutFiles(tmp_path, tiny_tokenizer()).write(7, *rejected())
    first, second, third = records(tmp_path / "7.jsonl")
    assert (first["response_mask"], first["rewards"]) == ([1, 1, 0], [0, 1, 0])
    assert (first["step"], first["acc"]) == (7, 1)
    assert (second["response_mask"], second["rewards"]) == ([1, 1], [0, 0.5])
    assert (third["response_mask"], third["score"]) == ([0, 0, 0], None)
    assert len(read_rollouts(tmp_path)) == 2


def test_samples_that_do_not_fit_on_the_disk_leave_no_file(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    with pytest.raises(
        LogFailed, match=rf"{small_disk}/rollouts/7\.jsonl: cannot be written \(No space left on device\)"
    ):
        RolloutFiles(small_disk / "rollouts", tiny_tokenizer()).write(7, *rejected())
    assert not list((small_disk / "rollouts").iterdir())


def test_targets_are_the_discounted_rewards() -> None:
    response = StoredResponse([5, 6], [7, 8, 9], [True, False, True], [0.0, 0.0, 2.0])
    other = StoredResponse([5], [7], [True], [1.0])
    batch = value_batch([response, other, response], gamma=0.5)
    assert batch.returns.tolist() == [[1, 0, 2], [1, 0, 0], [1, 0, 2]]  # the masked token costs no discount
    assert batch.prompt_ids.tolist() == [[5, 6], [5, 0], [5, 6]]
    assert batch.uid.tolist() == [0, 1, 0]


def test_no_prompt_is_on_both_sides() -> None:
    responses = [StoredResponse([number // 3], [1], [True], [0.0]) for number in range(30)]
    learned, held_out = split_by_prompt(responses, 0.2, seed=1)
    assert (len(learned), len(held_out)) == (24, 6)
    assert not {r.prompt_ids[0] for r in learned} & {r.prompt_ids[0] for r in held_out}
    assert [len(part) for part in split_by_prompt(responses, 0.0, seed=1)] == [27, 3]
    with pytest.raises(ValueError, match="all rows have the same prompt"):
        split_by_prompt(responses[:3], 0.2, seed=1)


GOOD = {"score": 1.0, "prompt_ids": [1], "response_ids": [2], "response_mask": [1], "rewards": [1.0]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no response in 1 files has a score"),
        ([GOOD | {"score": None}], "no response in 1 files has a score"),
        (
            [{"input": "a", "output": "b", "score": 1}],
            r"3.jsonl:1: no prompt_ids, response_ids, response_mask, rewards",
        ),
        ([GOOD, GOOD | {"rewards": []}], r"3.jsonl:2: 1 prompt_ids, 1 response_ids, 1 response_mask and 0 rewards"),
    ],
)
def test_bad_files_are_named(lines: list[dict], message: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "3.jsonl", lines)
    with pytest.raises(ValueError, match=message):
        read_rollouts(tmp_path)


def test_a_folder_without_rollouts(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"no rollouts .*trainer.rollout_data_dir"):
        read_rollouts(tmp_path)
    (tmp_path / "1.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"1.jsonl:1: not a line of JSON"):
        read_rollouts(tmp_path)


def pretrain(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["tether", "critic", "pretrain", *arguments])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_command(stored: Path, inputs: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """A critic that has seen rollouts explains those of other prompts, and a run that takes it begins with that."""
    base, out = by_prompt(inputs, stored.parent, tmp_path / "run"), tmp_path / "critic"
    options = ["--rollouts", str(stored), "--out", str(out), "--epochs", "6", "--held-out", "0.3"]
    learning = ["critic.optim.lr=3e-3", "critic.optim.lr_warmup_steps=-1", "trainer.logger=file"]
    assert pretrain([*base, *learning, *options], monkeypatch) == 0
    said = capsys.readouterr().out
    assert f"start the run with critic.model.path={out}" in said
    metrics = read_metrics(out)
    explained = {step: m["critic/vf_explained_var"] for step, m in metrics.items() if "critic/vf_explained_var" in m}
    assert explained[0] == 0  # the head is zero
    assert len(explained) == 7
    assert explained[max(explained)] > 0.5
    assert metrics[max(metrics)]["critic/vf_loss"] < metrics[1]["critic/vf_loss"]
    assert first_step([*base, f"critic.model.path={out}"])["critic/vf_explained_var"] > 0.5
    assert (out / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["env.train.id=CartPole-v1", "~actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"],
            "env.train.id: embodied runs store no rollouts",
        ),
        (["algorithm.adv_estimator=reinforce_plus_plus"], "critic.enable: there is no critic to train"),
        ([], "name the stored rollouts: --rollouts FOLDER, or trainer.rollout_data_dir=FOLDER"),
    ],
)
def test_the_command_refuses(arguments, message, stored: Path, inputs: Path, tmp_path: Path, monkeypatch, capsys):
    named = ["--rollouts", str(stored)] if arguments else []
    assert pretrain([*base_overrides(inputs, tmp_path), *arguments, *named], monkeypatch) == 2
    assert message in capsys.readouterr().err
