"""Mistakes of a user: one clear message each, which names what is wrong and what to do."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from tests.runs.tiny_run import GAE, LIGHT, base_overrides, rows, train, write_jsonl
from tests.tiny import save_tiny
from tether.checkpoints.store import CheckpointDamaged
from tether.config import load_config
from tether.text.build import build_run
from tether.text.rewards.outcome import RewardFailure

Spoil = Callable[[Path, Path], str]


def without(key: str) -> list[dict]:
    spoiled = rows()
    if key == "ground_truth":
        del spoiled[3]["reward_model"][key]
    else:
        spoiled[3][key] = None
    return spoiled


HALF_AN_EMOJI = "half \ud83d done"


def saying(text: str) -> list[dict]:
    spoiled = rows()
    spoiled[3]["prompt"][0]["content"] = text
    return spoiled


def with_added_token(folder: Path, token: str) -> Path:
    """A model whose tokenizer got a token that its embeddings do not have."""
    save_tiny(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([token])
    tokenizer.save_pretrained(folder)
    return folder


INPUTS: dict[str, tuple[Spoil, list[str]]] = {
    "missing data file": (
        lambda inputs, tmp: f"data.train_files={inputs / 'trian.jsonl'}",
        ["trian.jsonl", "no such file", "train.jsonl"],
    ),
    "empty data file": (
        lambda inputs, tmp: f"data.train_files={write_jsonl(tmp / 'empty.jsonl', [])}",
        ["empty.jsonl", "no rows"],
    ),
    "row without prompt": (
        lambda inputs, tmp: f"data.train_files={write_jsonl(tmp / 'rows.jsonl', without('prompt'))}",
        ["rows.jsonl row 3", "no `prompt`"],
    ),
    "row without ground truth": (
        lambda inputs, tmp: f"data.train_files={write_jsonl(tmp / 'rows.jsonl', without('ground_truth'))}",
        ["rows.jsonl row 3", "ground_truth"],
    ),
    "model path that does not exist": (
        lambda inputs, tmp: f"actor_rollout_ref.model.path={inputs / 'modle'}",
        ["modle", "no such file or directory", "model"],
    ),
    "text cut inside a character": (
        lambda inputs, tmp: f"data.train_files={write_jsonl(tmp / 'rows.jsonl', saying(HALF_AN_EMOJI))}",
        ["rows.jsonl row 3", "`prompt` holds half a character ('\\ud83d' at position 5)"],
    ),
    "tokenizer with more tokens than the model": (
        lambda inputs, tmp: f"actor_rollout_ref.model.path={with_added_token(tmp / 'model', '1+')}",
        ["model: its vocabulary has 260 tokens", "train.jsonl row 1 has the token 260", "tokenizer_path"],
    ),
    "critic path that does not exist": (
        lambda inputs, tmp: f"critic.model.path={inputs / 'critic'}",
        ["critic", "no such file or directory"],
    ),
    "model without a chat template": (
        lambda inputs, tmp: f"actor_rollout_ref.model.path={save_tiny(tmp / 'raw', chat_template=False)}",
        ["raw", "no chat template", "data.chat_template"],
    ),
    "prompt longer than the limit": (
        lambda inputs, tmp: "data.max_prompt_length=8",
        ["train.jsonl row 0", "data.max_prompt_length=8", "data.filter_overlong_prompts"],
    ),
    "data source without a reward": (
        lambda inputs, tmp: "custom_reward_function.path=null",
        ["tiny/sums", "custom_reward_function.path"],
    ),
    "several rows of tests that cannot be read": (
        lambda inputs, tmp: f"custom_reward_function.path=null data.train_files={broken_tests(tmp)}",
        ["code.jsonl row 0: the tests", "\n", "code.jsonl row 2: the tests"],
    ),
    "mappings that a column filled with null": (
        lambda inputs, tmp: f"custom_reward_function.path=null data.train_files={filled_tests(tmp)}",
        ["code.parquet row 0: input 0 has a mapping with null for 'b'", "code.parquet row 1: output 0", "JSON text"],
    ),
    "missing reward file": (
        lambda inputs, tmp: f"custom_reward_function.path={tmp / 'nothing.py'}",
        ["nothing.py", "no such file"],
    ),
    "missing reward function": (lambda inputs, tmp: "custom_reward_function.name=compute_scroe", ["compute_score"]),
    "reward file with a syntax error": (
        lambda inputs, tmp: f"custom_reward_function.path={reward_file(tmp, 'return (')}",
        ["spoiled.py, line 2"],
    ),
    "unknown estimator": (lambda inputs, tmp: "algorithm.adv_estimator=gea", ["algorithm.adv_estimator", "gae"]),
    "mini-batch over the batch": (
        lambda inputs, tmp: "actor_rollout_ref.actor.ppo_mini_batch_size=5",
        ["ppo_mini_batch_size", "data.train_batch_size=4"],
    ),
    "attention heads that devices cannot share": (
        lambda inputs, tmp: "actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 trainer.n_gpus_per_node=8",
        ["actor.ulysses_sequence_parallel_size=8", "the 4 attention heads of", "Set it to 1 or 2 or 4"],
    ),
    "attention heads of the critic": (
        lambda inputs, tmp: (
            "critic.ulysses_sequence_parallel_size=3 critic.model.use_remove_padding=True trainer.n_gpus_per_node=6"
        ),
        ["critic.ulysses_sequence_parallel_size=3", "the 4 attention heads of", "Set it to 1 or 2."],
    ),
    "resume path that is none": (
        lambda inputs, tmp: f"trainer.resume_mode=resume_path trainer.resume_from_path={tmp / 'global_step_7'}",
        ["global_step_7", "not a checkpoint"],
    ),
}


def broken_tests(folder: Path) -> Path:
    """Programming problems, two of three without a known layout of their tests."""
    truths = ['{"a": 1}', '{"inputs": ["1"], "outputs": ["1"]}', "{}"]
    made = [
        row | {"reward_model": {"style": "rule", "ground_truth": t}}
        for row, t in zip(rows("apps", count=3), truths, strict=True)
    ]
    return write_jsonl(folder / "code.jsonl", made)


def filled_tests(folder: Path) -> Path:
    """Calls with mappings of different keys, which a column of Parquet makes the same; the last has both keys."""
    whole = {"a": 1, "b": 2}
    calls = [({"a": 1}, whole), (whole, {"b": 2}), (whole, None)]
    truths = [{"fn_name": "f", "inputs": [[given]], "outputs": [expected]} for given, expected in calls]
    made = [
        row | {"reward_model": {"style": "rule", "ground_truth": truth}}
        for row, truth in zip(rows("apps", count=3), truths, strict=True)
    ]
    path = folder / "code.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(made), path)
    return path


def reward_file(folder: Path, body: str) -> Path:
    path = folder / "spoiled.py"
    path.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n")
    return path


@pytest.mark.parametrize("name", INPUTS)
def test_unusable_input(name: str, base: list[str], inputs: Path, tmp_path: Path):
    spoil, expected = INPUTS[name]
    overrides = [*base, *GAE, *spoil(inputs, tmp_path).split(" ")]
    with pytest.raises(ValueError) as caught:
        build_run(load_config(None, overrides))
    assert all(part in str(caught.value) for part in expected), str(caught.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


REWARDS = {
    "return {'points': 1}": 'a dict without "score"',
    "while True: pass": "gave no answer within the deadline of 0.2 s, so it was killed",
}


@pytest.mark.parametrize("body", REWARDS)
def test_failing_reward_stops_the_run_and_shows_the_sample(body: str, base: list[str], tmp_path: Path):
    started = time.monotonic()
    with pytest.raises(RewardFailure) as caught:
        train(
            [
                *base,
                "algorithm.adv_estimator=reinforce_plus_plus",
                f"custom_reward_function.path={reward_file(tmp_path, body)}",
                "data.train_batch_size=2",
                "reward_model.timeout=0.2",
            ]
        )
    assert "2 of 2 rewards failed (100.0%; the limit is 10.0%)" in str(caught.value)
    assert REWARDS[body] in str(caught.value)
    assert "ground truth: '" in str(caught.value)
    assert time.monotonic() - started < 60


@pytest.fixture(scope="module")
def saved(inputs: Path, tmp_path_factory) -> tuple[list[str], Path]:
    """Overrides of a run, and its folder with two checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    short = ["trainer.save_freq=1", "trainer.total_training_steps=2"]
    overrides = [*base_overrides(inputs, folder), *GAE, *LIGHT, *short]
    return overrides, train(overrides)


def test_going_on_with_other_data(saved, tmp_path: Path):
    overrides, _ = saved
    data = write_jsonl(tmp_path / "other.jsonl", rows(count=9))
    with pytest.raises(ValueError, match=r"data\.train_files: not what .*global_step_2 was trained with"):
        train([*overrides, f"data.train_files={data}"])


def test_going_on_with_another_model(saved, tmp_path: Path):
    overrides, _ = saved
    other = save_tiny(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"^actor_rollout_ref\.model\.path: not what .*resume_mode=disable"):
        train([*overrides, f"actor_rollout_ref.model.path={other}"])
    with pytest.raises(ValueError, match=r"^critic\.model\.path: not what"):
        train([*overrides, f"critic.model.path={other}"])


def test_moved_files_are_the_same_run(saved, inputs: Path, tmp_path: Path):
    overrides, _ = saved
    shutil.copytree(inputs / "model", tmp_path / "model")
    shutil.copy(inputs / "train.jsonl", tmp_path / "renamed.jsonl")
    train(
        [
            *overrides,
            f"actor_rollout_ref.model.path={tmp_path / 'model'}",
            f"data.train_files={tmp_path / 'renamed.jsonl'}",
        ]
    )


SLOW_FILES = ("training/trainer.pt", "critic/config.json", "run.yaml")


@pytest.mark.parametrize(
    "file", ["actor/model.safetensors", *(pytest.param(file, marks=pytest.mark.slow) for file in SLOW_FILES)]
)
def test_one_flipped_byte(file: str, saved, tmp_path: Path):
    overrides, directory = saved
    shutil.copytree(directory, tmp_path / "run")
    path = tmp_path / "run" / "global_step_2" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    overrides = [*overrides, f"trainer.default_local_dir={tmp_path / 'run'}"]
    with pytest.raises(CheckpointDamaged) as caught:
        train(overrides)
    assert str(path) in str(caught.value)
    offered = str(caught.value).partition("To continue from it: ")[2].split()
    assert offered == [
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path / 'run' / 'global_step_1'}",
    ]
    train([*overrides, *offered])  # what the message says, works
