"""The preflight of a language model: a check of two prompts and sixteen responses, with their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tether.batch import Prompt, TokenIds
from tether.loop.preflight import Finding
from tether.metrics.loggers import Sample
from tether.runtime.terminal import shortened
from tether.text.data.checks import (
    bos_problem,
    control_token_problem,
    cut_problem,
    opening_problem,
    repeated_problem,
    template_problem,
    turn_end_problem,
)
from tether.text.data.prompts import decode
from tether.text.learning.collector import ScoredResponses
from tether.text.learning.evaluation import samples_of
from tether.text.learning.rollouts import PromptSource, TextRollouts
from tether.text.rewards.outcome import Score
from tether.text.sampling.protocol import NoiseKey

PROMPTS_SHOWN = 2
RESPONSES = 16


@dataclass(frozen=True)
class ChatFormat:
    """The chat format: the settings `data.chat_template` and `data.apply_chat_template_kwargs`."""

    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ResponseSample:
    """Sampled prompts and responses, as a `tether.loop.preflight.PreflightSample`."""

    prompts: Sequence[Prompt]
    token_texts: Sequence[str]
    """The prompts as the model reads them, with special tokens written out."""
    samples: Sequence[Sample]
    findings: Sequence[Finding]
    step_rows: int

    def render(self) -> list[RenderableType]:
        renderables: list[RenderableType] = []
        for prompt, text in zip(self.prompts, self.token_texts, strict=True):
            renderables += [
                Text(f"prompt {prompt.index}, {len(prompt.token_ids)} tokens", style="bold"),
                Text(text.strip()),
                Text(_first_ids(prompt.token_ids), style="dim"),
            ]
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("prompt", "response", "truth", "reward"):
            table.add_column(column)
        for sample in self.samples:
            reward = "none" if sample.reward is None else f"{sample.reward:g}"
            table.add_row(
                str(sample.index),
                Text(shortened(" ".join(sample.response.split()), 80)),
                Text(shortened(" ".join(str(sample.ground_truth).split()), 24)),
                reward,
            )
        return [*renderables, table]


def sample_responses(source: PromptSource, rollouts: TextRollouts, chat: ChatFormat) -> ResponseSample:
    """Sample sixteen responses with the untrained policy."""
    tokenizer = rollouts.tokenizer
    count = min(len(source.dataset), max(1, RESPONSES // rollouts.sampling.n))
    prompts = [source.dataset[row] for row in range(count)]
    responses = rollouts.collector.collect(prompts, rollouts.sampling, NoiseKey(rollouts.seed, step=0))
    groups = rollouts.dynamic_sampling
    shown = prompts[:PROMPTS_SHOWN]
    return ResponseSample(
        shown,
        [decode(tokenizer, prompt.token_ids) for prompt in shown],
        list(samples_of(responses, rollouts.collector))[:RESPONSES],
        [*prompt_findings(source, rollouts, prompts, chat), *response_findings(rollouts, responses, chat)],
        (groups.num_groups if groups else source.sampler.batch_size) * rollouts.sampling.n,
    )


def prompt_findings(
    source: PromptSource, rollouts: TextRollouts, prompts: Sequence[Prompt], chat: ChatFormat
) -> list[Finding]:
    """Return the problems of the rendered prompts: BOS, template, truncation."""
    tokenizer, first = rollouts.tokenizer, prompts[0]
    findings = []
    if bos := bos_problem(tokenizer, first.token_ids):
        findings.append(Finding("bos", bos, refuses=bos.startswith("doubled")))
    if template := template_problem(tokenizer, first.token_ids, first.messages):
        findings.append(Finding("template_not_applied", template, refuses=True))
    elif opening := opening_problem(tokenizer, first.messages, chat.chat_template, chat.template_kwargs):
        findings.append(Finding("no_opening", opening))
    if cut := cut_problem(source.dataset.report):
        findings.append(Finding("prompt_cut", cut))
    if control := control_token_problem(source.dataset.report):
        findings.append(Finding("control_tokens", control))
    held_out = rollouts.evaluation.dataset if rollouts.evaluation else None
    if held_out is not None and (repeated := repeated_problem(held_out.report, len(held_out))):
        findings.append(Finding("repeated_questions", repeated))
    return findings


def response_findings(rollouts: TextRollouts, responses: ScoredResponses, chat: ChatFormat) -> list[Finding]:
    """Return the problems of the sampled responses: none ends, or all rewards are equal."""
    findings = []
    if not rollouts.sampling.ignore_eos:
        stop_token_ids = rollouts.collector.engine.eos_token_ids
        missed = None
        if stop_token_ids:
            missed = turn_end_problem(rollouts.tokenizer, stop_token_ids, chat.chat_template, chat.template_kwargs)
        if missed:
            findings.append(Finding("missed_eos", missed))
        elif bool(responses.rollout.truncated.all()):
            findings.append(_never_ends(rollouts, responses))
    scores = responses.scores[~responses.scores.isnan()]
    if len(scores) and bool((scores == scores[0]).all()):
        findings.append(
            Finding(
                "zero_reward_variance",
                f"all {len(scores)} sampled responses have the reward {scores[0]:g}: if rewards do not differ, there "
                "is nothing to learn. Check the reward on the responses above, or begin with an easier task.",
            )
        )
    if not len(scores):
        message = "no sampled response has a reward: all abstained or failed. Check the reward function."
        findings.append(Finding("no_reward", message, refuses=True))
    return findings


def _never_ends(rollouts: TextRollouts, responses: ScoredResponses) -> Finding:
    if not rollouts.collector.engine.eos_token_ids:
        return Finding(
            "no_eos",
            "the model names no end-of-sequence token, so every response runs to the limit. Set eos_token_id in its "
            "generation_config.json.",
        )
    by_turns = sum(o.extra.get("cut_by_turn_limit", 0) for o in responses.outcomes if isinstance(o, Score))
    if by_turns:
        return Finding(
            "all_truncated",
            f"none of {len(responses.texts)} sampled conversations ended by itself: {by_turns:.0f} were cut by "
            "actor_rollout_ref.rollout.multi_turn.max_assistant_turns or max_user_turns. Raise it, or end them sooner.",
        )
    return Finding(
        "all_truncated",
        f"all {len(responses.texts)} sampled responses were cut at data.max_response_length="
        f"{rollouts.sampling.max_new_tokens} tokens, none ended by itself. Raise it, or request shorter answers.",
    )


def _first_ids(ids: TokenIds, shown: int = 24) -> str:
    text = " ".join(map(str, ids[:shown]))
    return f"{text} ... {ids[-1]}" if len(ids) > shown else text
