"""Chat templates that write today's date (Llama 3.2, Granite): a run writes that of its first start on all its days."""

from collections.abc import Iterator
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import transformers.utils.chat_template_utils

import tether
from tests.runs.tiny_run import GRPO, LIGHT, base_overrides, train, write_inputs, write_jsonl
from tests.tiny import EOS_ID, save_tiny_reward_model, tiny_tokenizer
from tether.config import load_config
from tether.integrations.reward_models.build import RewardTrainingOptions
from tether.integrations.reward_models.command import train_reward_model
from tether.metrics.loggers.jsonl import read_metrics
from tether.text.data import prompts
from tether.text.data.prompts import dated_template, write_conversation
from tether.text.inputs import build_dataset
from tether.text.learning.pretraining import Pretraining
from tether.text.models.load import load_tokenizer
from tether.text.rewards.build import _reader
from tether.text.rewards.outcome import Dialogue, RewardRequest
from tether.text.turns.build import build_conversations

WRITES_THE_DATE = (
    "{% if strftime_now is defined %}{% set today = strftime_now('%d %b %Y') %}"
    "{% else %}{% set today = 'x' %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ today }} {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = [{"role": "user", "content": "7?"}]


class Clock:
    """Moves the dates that Python and transformers tell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.days = 0
        clock = self

        class Today(date):
            @classmethod
            def today(cls) -> Any:
                return date(2026, 11, 29) + timedelta(clock.days)

        class Now(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return datetime(2026, 11, 29, 23, 59) + timedelta(clock.days)

        monkeypatch.setattr(prompts, "date", Today)
        monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_calls_of_the_date_are_replaced(clock: Clock):
    """As Llama 3.2, Granite and gpt-oss write them; other templates stay what they are."""
    tokenizer = tiny_tokenizer()
    for call, written in (
        ('strftime_now("%d %b %Y")', "01 Feb 2026"),
        ("strftime_now( '%B %d, %Y' )", "February 01, 2026"),
        ("strftime_now(format='%Y-%m-%d')", "2026-02-01"),
    ):
        template = dated_template(
            tokenizer, "{% if strftime_now is defined %}{{ " + call + " }}{% endif %}", "2026-02-01"
        )
        assert write_conversation(ASKED, tokenizer, chat_template=template) == written
    assert dated_template(tokenizer, None, "2026-02-01") is None
    assert dated_template(tokenizer, WRITES_THE_DATE, None) == WRITES_THE_DATE
    assert "29 Nov 2026" in write_conversation(ASKED, tokenizer, chat_template=WRITES_THE_DATE)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Those of a tiny run, whose model's tokenizer has the template."""
    inputs, tokenizer = write_inputs(tmp_path), tiny_tokenizer()
    tokenizer.chat_template = WRITES_THE_DATE
    tokenizer.save_pretrained(inputs / "model")
    return inputs


def test_a_run_goes_on_the_next_day_with_the_date_of_its_first_start(clock: Clock, inputs: Path, tmp_path: Path):
    """So does a policy that is loaded from it; a checkpoint's template is the original one."""
    overrides = [
        *base_overrides(inputs, tmp_path / "run"), *GRPO, *LIGHT,
        "data.max_prompt_length=128", "trainer.save_freq=1", "trainer.preflight=False",
    ]  # fmt: skip
    train([*overrides, "trainer.total_training_steps=1"])
    clock.days = 1
    run = train([*overrides, "trainer.total_training_steps=2"])
    saved = run / "global_step_2"
    assert load_config(saved / "run.yaml", []).config.data.chat_template_date == "2026-11-29"
    assert "strftime_now" in (saved / "actor" / "chat_template.jinja").read_text()
    policy = tether.load(run)
    assert policy._text is not None
    assert "29 Nov 2026" in tiny_tokenizer().decode(policy._text[2](ASKED))
    with pytest.raises(ValueError, match=r"data\.train_files: not what .* data\.chat_template_date"):
        train([*overrides, "trainer.total_training_steps=3", "data.chat_template_date=2026-12-01"])


class NoTools:
    """As a pool whose processes have no tools."""

    schemas = ()


def test_everything_that_a_run_writes_by_a_template_has_its_date(clock: Clock, inputs: Path, tmp_path: Path):
    """Turns of a conversation, a reward model with its own template, a custom dataset that applies the tokenizer's."""
    scorer = save_tiny_reward_model(tmp_path / "scorer")
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def __init__(self, *, data_files, tokenizer, config):\n"
        "        self.text = tokenizer.apply_chat_template([{'role': 'user', 'content': '7?'}], tokenize=False)\n"
        "    def __len__(self):\n        return 1\n"
        "    def __getitem__(self, index):\n"
        "        rule = {'style': 'rule', 'ground_truth': '2'}\n"
        "        return {'prompt': self.text, 'data_source': 'toy', 'reward_model': rule}\n"
    )
    overrides = [
        *base_overrides(inputs, tmp_path / "run"), "algorithm.adv_estimator=grpo", "data.max_prompt_length=200",
        "data.chat_template_date=2026-02-01", "reward_model.enable=True", f"reward_model.model.path={scorer}",
        f"data.custom_cls.path={tmp_path / 'mine.py'}", "data.custom_cls.name=Mine",
        "custom_reward_function.path=null",
    ]  # fmt: skip
    config, tokenizer = load_config(None, overrides).config, load_tokenizer(inputs / "model")
    rollout = config.actor_rollout_ref.rollout
    dataset = build_dataset(config.data, rollout.agent.default_agent_loop, tokenizer, ["unused"], -1, shuffle=False)
    assert dataset[0].messages[0]["content"].endswith("user\n01 Feb 2026 7?<|im_end|>\n")
    assert tokenizer.chat_template == WRITES_THE_DATE
    pool: Any = NoTools()
    conversations = build_conversations(
        rollout, config.data, pool, tokenizer, frozenset({EOS_ID}), [dataset], environments_score_alone=False
    )
    assert conversations is not None
    replies = conversations.template.replies(ASKED, [ASKED])
    assert "user\n01 Feb 2026 7?" in tokenizer.decode(replies)
    tokenizer.save_pretrained(scorer)
    request = RewardRequest("toy", "14", "14", {}, Dialogue(messages=ASKED, prompt_ids=(), response_ids=()))
    read = _reader(config.reward_model, scorer, config.data.chat_template_date).ids(request)
    assert tokenizer.decode(read).count("01 Feb 2026") == 2


def test_a_reward_model_is_trained_on_the_same_pairs_the_next_day(
    clock: Clock, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Stopped in its first step and resumed: the scores are those of the training that was not stopped."""
    sides = [{"prompt": f"{i}?", "chosen": "a" * (i + 1), "rejected": "b"} for i in range(8)]
    pairs = [str(write_jsonl(tmp_path / "pairs.jsonl", sides))]
    options = RewardTrainingOptions(lr=1e-2, batch_size=2, micro_batch_size=4, held_out=0.25, device="cpu")
    train_reward_model(str(inputs / "model"), pairs, tmp_path / "whole", options, save_every=1)
    whole = Pretraining.run

    def stopped(training: Pretraining, done: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
        for step, metrics in whole(training, done):
            yield step, metrics
            if step == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(Pretraining, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        train_reward_model(str(inputs / "model"), pairs, tmp_path / "parts", options, save_every=1)
    monkeypatch.setattr(Pretraining, "run", whole)
    clock.days = 1
    train_reward_model(str(inputs / "model"), pairs, tmp_path / "parts", options, save_every=1)
    assert read_metrics(tmp_path / "parts") == read_metrics(tmp_path / "whole")
