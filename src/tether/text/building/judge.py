"""Judges of a run: an HTTP endpoint, or a model in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.config import JudgePart, RunConfig
from tether.runtime.cache import cache_dir
from tether.runtime.http import check_listening, secret_from
from tether.runtime.machine import resolve_device
from tether.text.building.judging import judge_of
from tether.text.building.loading import load_engine
from tether.text.data.chat import dated_template, decode, write_conversation
from tether.text.data.control_tokens import ControlTokens
from tether.text.models.layers import context_length
from tether.text.models.load import load_config, load_tokenizer
from tether.text.models.model_path import resolve_model_path
from tether.text.rewards import RewardError
from tether.text.rewards.judge import BatchJudge, Judge, RemoteJudge, end_of
from tether.text.rewards.service import Endpoint, ModelRewards, RemoteRewards
from tether.text.sampling import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams


def check_judge(key: str, section: JudgePart) -> None:
    """Refuse an unusable judge, without loading a model.

    Raises:
        ValueError: the template, parser, endpoint, key or model is invalid; the message begins with `key`.
    """
    judge_of(key, section)
    if section.base_url is not None:
        secret_from(section.api_key_env, f"{key}.api_key_env")
        check_listening(section.base_url, f"{key}.base_url")
    else:
        path = resolve_model_path(str(section.path), cache_dir())
        if not load_tokenizer(path).chat_template:
            raise ValueError(f"{key}.path={path}: its tokenizer has no chat template, by which a judge is asked")


def build_judge(config: RunConfig, key: str, section: JudgePart) -> RemoteRewards | ModelRewards:
    """Build a judge.

    Raises:
        ValueError: as in `check_judge`, or the model cannot be loaded.
    """
    judge = judge_of(key, section)
    if section.path is not None:
        path = resolve_model_path(section.path, cache_dir())
        engine = load_engine(path, resolve_device(config.trainer.device), section.dtype)
        context = context_length(load_config(path))
        tokenizer = load_tokenizer(path)
        template = dated_template(tokenizer, None, config.data.chat_template_date)
        return ModelRewards(model_judge(judge, EngineAnswers(engine, tokenizer, section.max_tokens, context, template)))
    endpoint = Endpoint(
        f"{str(section.base_url).rstrip('/')}/chat/completions",
        secret_from(section.api_key_env, f"{key}.api_key_env"),
        section.timeout,
        section.attempts,
    )
    options = {
        "model": section.model,
        "temperature": section.temperature,
        "max_tokens": section.max_tokens,
        **section.extra_body,
    }
    sent = {name: value for name, value in options.items() if value is not None}
    return RemoteRewards(RemoteJudge(judge, endpoint, sent), section.max_concurrent)


def model_judge(judge: Judge, answers: EngineAnswers) -> BatchJudge:
    """Return a judge in this process, which reads control tokens in a response as text."""
    return BatchJudge(judge, answers, answers.control.as_text)


class EngineAnswers:
    """Greedy answers of a model in this process.

    Args:
        engine: engine of the model.
        tokenizer: tokenizer of the model.
        max_tokens: maximum tokens of an answer; a longer one is an error.
        context: maximum positions of the model; None: no limit.
        chat_template: instead of the tokenizer's.
    """

    def __init__(
        self,
        engine: NativeEngine,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        context: int | None,
        chat_template: str | None = None,
    ) -> None:
        self._engine, self._tokenizer, self._max_tokens, self._context = engine, tokenizer, max_tokens, context
        self._chat_template = chat_template
        self.control = ControlTokens(tokenizer)

    def __call__(self, conversations: Sequence[Sequence[dict[str, str]]]) -> list[str | RewardError]:
        """Return the answer to each conversation, or an error."""
        read = [self._read(messages) for messages in conversations]
        prompts = [ids for ids in read if not isinstance(ids, RewardError)]
        answers = iter(self._answer(prompts) if prompts else [])
        return [ids if isinstance(ids, RewardError) else next(answers) for ids in read]

    def _read(self, messages: Sequence[dict[str, str]]) -> Any:
        """Return the token ids of a conversation, or the error if it is not a valid prompt."""
        try:
            arguments = {"chat_template": self._chat_template, "add_generation_prompt": True}
            text = write_conversation(messages, self._tokenizer, **arguments)
        except ValueError as error:
            return RewardError(f"of the judge, {error}")
        ids = self.control.tokenize(text)
        if self._context is not None and len(ids) + self._max_tokens > self._context:
            room = f"{len(ids)} tokens to read and {self._max_tokens} to answer"
            return RewardError(f"the judge has {self._context} positions, and {room} are more")
        return ids

    def _answer(self, prompts: Sequence[Any]) -> list[str | RewardError]:
        sampling = SamplingParams(self._max_tokens, temperature=0.0, record_kept=False)
        drawn = self._engine.generate(prompts, sampling, NoiseKey(0, 0))
        rows = zip(drawn.response_ids, drawn.response_length.tolist(), drawn.truncated.tolist(), strict=True)
        answers: list[str | RewardError] = []
        for ids, length, truncated in rows:
            text = decode(self._tokenizer, ids[:length].tolist(), skip_special_tokens=True)
            answers.append(self._cut(text) if truncated else text)
        return answers

    def _cut(self, text: str) -> RewardError:
        """Return the error for a truncated answer, whose score might have been revised later."""
        what = f"the judge did not end its answer within {self._max_tokens} tokens"
        return RewardError(f"{what}; it ends in {end_of(text)!r}")
