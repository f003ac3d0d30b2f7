"""The process behind `tether view --rescore`: python -m tether.commands.rescore

It reads a request of `tether.view.rescoring` from its stdin, and writes the outcome of each response as JSON. Reward
models compute on the CPU, because a GPU may be busy with the run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from transformers import PreTrainedTokenizerBase

from tether.commands.policy import moved_files, started_folder
from tether.config import ConfigError, RunConfig, has_secrets, load_config, values_of, with_values
from tether.runtime.cache import cache_dir
from tether.runtime.machine import set_threads
from tether.runtime.objects import is_object
from tether.runtime.user_files import append_import_path
from tether.text.data.prompts import decode
from tether.text.data.rows import Row
from tether.text.inputs import build_tokenizer, read_rows
from tether.text.learning.recording import recorded_values
from tether.text.models.model_path import resolve_model_path
from tether.text.rewards.build import build_rewards
from tether.text.rewards.outcome import Dialogue, RewardError, RewardOutcome, RewardRequest, Score
from tether.types import JsonObject

MAX_WORKERS = 4
"""Maximum number of reward processes, since a run may be training on this machine."""
MAX_CHARACTERS = 10_000
"""Maximum length of a text that a reward returns in addition to the score."""


def rescore(values: JsonObject, folder: Path, reward: str | None, responses: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the outcome of each response.

    Args:
        values: the recorded configuration of the run.
        folder: folder of the run.
        reward: ``FILE.py:NAME`` of a function instead of the reward of the run.
        responses: for each response its row in the dataset, its text (None: only token ids were recorded completely),
            and the token ids of prompt and response (None: not recorded).

    Raises:
        ValueError: the reward cannot be loaded or needs inputs that were not recorded, or the data are missing.
    """
    config = _config(values, folder, reward, len(responses))
    _check(config, responses)
    set_threads(config.trainer.num_threads)
    data, model, tokenizer = config.data, config.actor_rollout_ref.model, None
    if data.custom_cls.path or any(response["text"] is None for response in responses):
        path = resolve_model_path(model.tokenizer_path, cache_dir(), weights=False)
        tokenizer = build_tokenizer(data, model, path)
    rows = read_rows(data, tokenizer, data.train_files)
    missing = next((response["index"] for response in responses if response["index"] >= len(rows)), None)
    if missing is not None:
        raise ValueError(f"data.train_files: has no row {missing}, which was answered, but {len(rows)} rows now")
    answered = [rows[response["index"]] for response in responses]
    requests = [_request(row, response, tokenizer) for row, response in zip(answered, responses, strict=True)]
    with build_rewards(config) as rewards:
        outcomes = rewards.score(requests)
        seconds = list(rewards.durations)
    return [_as_json(*one) for one in zip(answered, outcomes, seconds, strict=True)]


def _request(row: Row, response: JsonObject, tokenizer: PreTrainedTokenizerBase | None) -> RewardRequest:
    text = response["text"]
    if text is None:
        assert tokenizer
        text = decode(tokenizer, response["response_ids"], skip_special_tokens=True)
    dialogue = Dialogue(row.messages, response["prompt_ids"] or (), response["response_ids"])
    return RewardRequest(row.data_source, text, row.ground_truth, row.extra_info, dialogue)


def _config(values: JsonObject, folder: Path, reward: str | None, count: int) -> RunConfig:
    """Return the configuration of a run with the reward that is to score `count` of its responses."""
    # Loaded from a file, because configurations of older versions lack newer keys.
    with TemporaryDirectory() as temporary:
        file = Path(temporary) / "run.yaml"
        file.write_text(yaml.safe_dump(values))
        try:
            config = load_config(file, []).config
        except ConfigError as error:
            raise ValueError(f"{folder}: this version of tether cannot read its configuration: {error}") from error
    if (started_in := started_folder(config, folder)) is not None:
        config = with_values(config, moved_files(values_of(config), started_in))
    changed: dict[str, object] = {"trainer.device": "cpu", "reward_model.num_workers": min(count, MAX_WORKERS)}
    if reward is not None:
        path, _, name = reward.rpartition(":")
        changed |= {"custom_reward_function.path": path, "custom_reward_function.name": name}
        changed |= {"reward_model.enable": False, "reward_model.parts": {}, "reward_model.reward_manager": "naive"}
    return with_values(config, changed)


def _as_json(row: Row, outcome: RewardOutcome, seconds: float) -> JsonObject:
    answer: JsonObject = {"score": None, "extra": {}, "error": None, "traceback": None, "seconds": seconds}
    answer |= {"place": row.place, "ground_truth": str(row.ground_truth)}
    answer["prompt"] = "\n".join(str(message.get("content", "")) for message in row.messages)
    if isinstance(outcome, Score):
        answer |= {"score": outcome.value, "extra": recorded_values(outcome, MAX_CHARACTERS)}
    elif isinstance(outcome, RewardError):
        answer |= {"error": outcome.message, "traceback": outcome.traceback}
    return answer


def _check(config: RunConfig, responses: Sequence[JsonObject]) -> None:
    """Refuse a reward that needs inputs which a run does not record.

    Raises:
        ValueError: the message names the key and what is missing.
    """
    rollout, reward, files = config.actor_rollout_ref.rollout, config.reward_model, config.data.train_files
    if rollout.multi_turn.enable or rollout.agent.plays_endpoint:
        raise ValueError(
            "responses in several turns cannot be scored again: the rewards of tools, environments or programs are "
            "not recorded one by one"
        )
    for key, value in (
        ("custom_reward_function.path", config.custom_reward_function.path),
        ("data.train_files", files[0]),
    ):
        if value is not None and is_object(value):
            fix = ". Name a file with --reward FILE.py:NAME" if key.endswith("path") else ""
            raise ValueError(f"{key}={value}: was an object of the program that trained, and no file{fix}")
    for key in ("custom_reward_function", "reward_model"):
        if has_secrets(getattr(config, key).model_dump()):
            raise ValueError(
                f"{key}: has a secret, which a run does not record. Let the reward read it from an environment variable"
            )
    if reward.enable and reward.model.input_tokenizer is None and any(one["response_ids"] is None for one in responses):
        raise ValueError(
            "reward_model.model.input_tokenizer=null: the reward model reads token ids, which are recorded of the "
            "chosen samples of a step only. Take one of those"
        )


def main() -> None:
    """Answer one request."""
    os.nice(10)  # lower priority than training on this machine
    append_import_path(Path.cwd())
    request = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)  # keeps prints of a reward out of the answer
        try:
            outcomes = rescore(request["config"], Path(request["folder"]), request["reward"], request["responses"])
            answer: JsonObject = {"outcomes": outcomes}
        except ValueError as error:
            answer = {"error": str(error)}
        json.dump(answer, stdout)


if __name__ == "__main__":
    main()
