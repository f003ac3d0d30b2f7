"""Samples responses to the calls of programs that play episodes, and makes training rows of them.

All waiting calls form one batch for the engine. When a program has ended, the main branch of its episode is scored and
becomes a row, in which `response_mask` selects the tokens that the policy sampled. All rows of a prompt must have the
same prompt tokens, so these are the tokens with which all their first calls begin. Further branches are rows that are
added later (`tether.text.learning.branches`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby, takewhile

import torch
from tensordict import NonTensorStack
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tether.batch import KeptTokens, Prompt, RolloutBatch, as_token_ids
from tether.config.support.live_keys import is_own_function
from tether.runtime.interrupt import raise_if_interrupted
from tether.runtime.worker_pool import WorkersFailed
from tether.text.data.prompts import decode
from tether.text.learning.collector import Collector, ScoredResponses, seconds_by_row
from tether.text.rewards.outcome import (
    Dialogue,
    RewardError,
    RewardFailure,
    RewardOutcome,
    RewardRequest,
    Score,
    check_error_rate,
    is_float32,
    summarize,
)
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams
from tether.text.turns.endpoint.endpoint import AgentEndpoint
from tether.text.turns.endpoint.episode import (
    AgentEpisode,
    Context,
    PendingCall,
    RecordedCall,
    SampledTurn,
    num_sampled,
)
from tether.text.turns.endpoint.programs import CLIENT_HINT, EpisodeResult
from tether.text.turns.endpoint.protocol import CallRefused

POLL_SECONDS = 0.05
"""Interval of checks for programs that have ended, while no call is waiting."""
NO_ANSWER = (
    "the program received no answer: it made no call that the policy could answer, or closed all connections before "
    "the answers were complete, as a client with a timeout does"
)
NO_REWARD = "the program gave no reward: a finite number sent to /v1/reward, returned, or as its last line of output"
OTHER_BEGINNING = "its first call begins with another token than those of the other episodes of its row"


@dataclass(frozen=True, kw_only=True)
class EpisodeCollector(Collector):
    """Lets programs play episodes with the policy, and scores them."""

    endpoint: AgentEndpoint
    max_length: int
    """Maximum number of tokens in a call, read and sampled together."""

    def collect(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        key: NoiseKey,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> ScoredResponses:
        rows = [prompt for prompt in prompts for _ in range(sampling.n)]
        main: dict[int, list[RecordedCall]] = {}
        requests: dict[int, RewardRequest] = {}
        outcomes: dict[int, RewardOutcome] = {}

        def end(episode: AgentEpisode, played: EpisodeResult) -> None:
            row = episode.row
            main[row] = episode.main_branch()
            requests[row] = self._request(episode.prompt, main[row])
            if (outcome := self._outcome(episode, played)) is not None:
                outcomes[row] = outcome
            else:
                self.rewards.submit(row, requests[row])
            if on_progress:
                on_progress(len(requests), len(rows))
            if prefixes is not None:
                for branch in episode.branches():
                    prefixes.forget(as_token_ids(branch[-1].token_ids()[:-1], "the branch"))

        # Servers cache prefixes by themselves.
        keeping = self.engine.caching_prefixes() if isinstance(self.engine, NativeEngine) else nullcontext()
        with keeping as prefixes, self.endpoint.run_episodes(rows, key.first_sample) as programs:
            episodes = list(programs.values())
            self._play(programs, sampling, key, end)
        start = time.perf_counter()
        left = [row for row in range(len(rows)) if row not in outcomes]
        outcomes |= zip(left, self.rewards.collect(), strict=True)
        waited = time.perf_counter() - start
        in_order = [main[row] for row in range(len(rows))]
        for row in with_other_beginnings(in_order, sampling.n):
            in_order[row], outcomes[row] = [], RewardError(OTHER_BEGINNING)
        counted = [_with_counts(outcomes[episode.row], episode) for episode in episodes]
        report = summarize([requests[row] for row in range(len(rows))], counted, self.rewards.durations or [0.0])
        check_error_rate(report, self.max_error_rate)
        rollout = assemble(in_order, sampling.n, filler=min(self.engine.eos_token_ids, default=0))
        rollout.truncated = rollout.truncated | torch.tensor([bool(episode.cut_by) for episode in episodes])
        branches = {
            episode.row: further_rows(episode, rollout.prompt_ids[row, : rollout.prompt_length[row]].tolist())
            for row, episode in enumerate(episodes)
            if isinstance(outcomes[row], Score) and episode.further_branches()
        }
        texts = [self._text(branch) for branch in in_order]
        seconds = seconds_by_row(len(rows), left, self.rewards.durations)
        return ScoredResponses(prompts, rollout, texts, counted, report, waited, seconds, branches)

    def _text(self, branch: Sequence[RecordedCall]) -> str:
        """Return everything after the first prompt of a branch."""
        ids = branch[-1].token_ids()[len(branch[0].read) :] if branch else []
        return decode(self.tokenizer, ids, skip_special_tokens=True)

    def _play(
        self,
        programs: dict[int, AgentEpisode],
        sampling: SamplingParams,
        key: NoiseKey,
        on_ended: Callable[[AgentEpisode, EpisodeResult], None],
    ) -> None:
        """Answer calls until all programs have ended.

        Raises:
            RewardFailure: processes of programs can no longer be started.
        """
        running, last_progress = dict(programs), time.monotonic()
        while running:
            calls = self.endpoint.calls(len(running), POLL_SECONDS)
            self._answer(calls, sampling, key)
            try:
                ended = self.endpoint.pop_finished(running)
            except WorkersFailed as error:
                raise RewardFailure(str(error)) from error
            for program, played in ended.items():
                episode = running.pop(program)
                self.endpoint.end(episode)
                on_ended(episode, played)
            if calls or ended:
                last_progress = time.monotonic()
            raise_if_interrupted(last_progress, "no program made a call or ended")

    def _answer(self, calls: Sequence[PendingCall], sampling: SamplingParams, key: NoiseKey) -> None:
        """Answer calls; those with the same token limit are one batch.

        A call whose client has closed its connection is not recorded: the program does not know what was sampled.
        """
        accepted: list[tuple[int, PendingCall, Context]] = []
        for call in calls:
            if not call.answer.set_running_or_notify_cancel():  # the client hung up, or the server is closing
                call.episode.num_undelivered += 1
                continue
            try:
                context = call.episode.context(call.request, self.endpoint.chat, self.max_length)
            except CallRefused as refusal:
                call.answer.set_exception(refusal)
                continue
            limit = min(call.request.max_tokens or sampling.max_new_tokens, sampling.max_new_tokens)
            accepted.append((limit, call, context))
        accepted.sort(key=lambda item: item[0])
        for limit, items in groupby(accepted, key=lambda item: item[0]):
            group = [(call, context) for _, call, context in items]
            noise = replace(key, samples=tuple(call.episode.noise(context) for call, context in group))
            once = replace(sampling, n=1, max_new_tokens=limit, max_length=self.max_length)
            rollout = self.engine.generate([context.token_ids for _, context in group], once, noise)
            asked_for = limit < sampling.max_new_tokens
            for (call, context), turn in zip(group, _turns(rollout, asked_for, self.max_length), strict=True):
                if call.disconnected.is_set():
                    call.episode.num_undelivered += 1
                else:  # recorded before it is sent, because the program's next call may continue it
                    call.answer.set_result(call.episode.record(context, turn, self.endpoint.chat))

    def _outcome(self, episode: AgentEpisode, played: EpisodeResult) -> RewardOutcome | None:
        """Return the outcome of an episode that has ended; None if the reward function has to score it.

        If a program fails after a limit has truncated its episode, that is not an error.
        """
        if not episode.calls or (played.error and not episode.cut_by):
            hint = f". {CLIENT_HINT}" if is_own_function(self.endpoint.options.program) else ""
            return RewardError(played.error or NO_ANSWER + hint)
        if self.endpoint.options.reward == "function":
            return None
        reward = played.reward if episode.reward is None else episode.reward
        if reward is None or not is_float32(reward):
            return RewardError(played.error or NO_REWARD)
        return Score(reward)

    def _request(self, prompt: Prompt, branch: Sequence[RecordedCall]) -> RewardRequest:
        """Return the arguments of a reward function: the policy's turns, one per line, and the conversation."""
        turns = [decode(self.tokenizer, call.turn.token_ids, skip_special_tokens=True) for call in branch]
        conversation = [dict(message) for message in branch[-1].conversation] if branch else []
        extra = {**prompt.extra_info, "num_turns": len(branch), "conversation": conversation}
        read = branch[0].read if branch else []
        dialogue = Dialogue(prompt.messages, read, branch[-1].token_ids()[len(read) :] if branch else [])
        return RewardRequest(prompt.data_source, "\n".join(turns), prompt.ground_truth, extra, dialogue)


def _with_counts(outcome: RewardOutcome, episode: AgentEpisode) -> RewardOutcome:
    """Add counts of an episode to its score, for metrics."""
    if not isinstance(outcome, Score):
        return outcome
    counts = {
        "calls": float(len(episode.calls)),
        "undelivered_calls": float(episode.num_undelivered),
        "branches": float(len(episode.branches())),
        "branch_tokens": float(num_sampled(episode.calls) - num_sampled(episode.main_branch())),
        "cut_by_call_limit": float(episode.cut_by == "calls"),
        "cut_by_length_limit": float(episode.cut_by == "length"),
    }
    return Score(outcome.value, outcome.extra | counts)


def _turns(rollout: RolloutBatch, limit_asked_for: bool, max_length: int) -> Iterator[SampledTurn]:
    """Yield each row of a rollout of single turns.

    Args:
        rollout: the rollout.
        limit_asked_for: whether the limit on new tokens is the one that the calls requested.
        max_length: maximum number of tokens of prompt and response.
    """
    assert rollout.policy_version is not None
    total = rollout.prompt_length + rollout.response_length
    truncated = rollout.truncated & ((total == max_length) | (not limit_asked_for))
    kept = None if rollout.kept is None else list(zip(rollout.kept.count, rollout.kept.words, strict=True))
    for row, length in enumerate(rollout.response_length.tolist()):
        versions = [int(rollout.policy_version[row])] * length
        if rollout.token_versions is not None:
            versions = rollout.token_versions[row, :length].tolist()
        yield SampledTurn(
            token_ids=rollout.response_ids[row, :length].tolist(),
            log_probs=rollout.rollout_log_probs[row, :length].tolist(),
            versions=versions,
            ended=not bool(rollout.truncated[row]),
            truncated=bool(truncated[row]),
            kept=None if kept is None else (kept[row][0][:length], kept[row][1]),
        )


def with_other_beginnings(branches: Sequence[Sequence[RecordedCall]], n: int) -> list[int]:
    """Return the rows whose first call begins with a different token than the first row of the same prompt."""
    rows: list[int] = []
    for first in range(0, len(branches), n):
        tokens = {row: branches[row][0].read[0] for row in range(first, first + n) if branches[row]}
        rows += [row for row, token in tokens.items() if token != next(iter(tokens.values()))]
    return rows


@dataclass
class _Row:
    """The response of a row."""

    token_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept_counts: list[Tensor] = field(default_factory=list)
    kept_words: list[Tensor] = field(default_factory=list)
    truncated: bool = True

    def read(self, ids: Sequence[int], version: int) -> None:
        """Append what the policy read before a turn; `version` is that of the weights that sampled the turn."""
        self.token_ids += ids
        self.mask += [False] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.versions += [version] * len(ids)
        self.kept_counts.append(torch.zeros(len(ids), dtype=torch.int32))

    def sample(self, turn: SampledTurn) -> None:
        """Append a turn of the policy."""
        self.token_ids += turn.token_ids
        self.mask += [True] * len(turn.token_ids)
        self.log_probs += turn.log_probs
        self.versions += turn.versions
        self.truncated = turn.truncated
        if turn.kept is not None:
            self.kept_counts.append(turn.kept[0])
            self.kept_words.append(turn.kept[1])


def assemble(branches: Sequence[Sequence[RecordedCall]], n: int, filler: int) -> RolloutBatch:
    """Return a rollout with a row for each branch; an empty branch becomes a row without tokens to train on.

    Args:
        branches: the calls of each row; rows of the same prompt are adjacent and begin with the same token.
        n: rows per prompt.
        filler: the only token of an empty row.
    """
    prompts: list[list[int]] = []
    rows: list[_Row] = []
    for first in range(0, len(branches), n):
        group = branches[first : first + n]
        columns = zip(*(branch[0].read for branch in group if branch), strict=False)
        shared = [tokens[0] for tokens in takewhile(lambda tokens: len({*tokens}) == 1, columns)] or [filler]
        prompts += [shared] * n
        rows += [_row(branch, len(shared)) if branch else _empty_row(filler) for branch in group]
    return _as_batch(prompts, rows, n)


def further_rows(episode: AgentEpisode, prompt: list[int]) -> RolloutBatch:
    """Return a rollout with a row for each further branch of an episode, which must have at least one.

    A row trains on those of its calls that neither the main branch nor a row before it has.

    Args:
        episode: the episode.
        prompt: the prompt of its main branch; a branch that begins with it gets the same prompt.
    """
    prompts: list[list[int]] = []
    rows: list[_Row] = []
    learned = set(episode.main_branch())
    for branch in episode.further_branches():
        beginning = branch[0].read
        prompts.append(prompt if beginning[: len(prompt)] == prompt else beginning)
        rows.append(_row(branch, len(prompts[-1]), learned))
        learned.update(branch)
    return _as_batch(prompts, rows, len(rows))


def _row(branch: Sequence[RecordedCall], prompt_length: int, learned: Collection[RecordedCall] = ()) -> _Row:
    """Return the row of a branch; responses to `learned` calls count as read, because other rows train on them."""
    row = _Row()
    for index, call in enumerate(branch):
        row.read(call.read[0 if index else prompt_length :], call.turn.versions[0])
        if call in learned:
            row.read(call.turn.token_ids, call.turn.versions[0])
        else:
            row.sample(call.turn)
    return row


def _empty_row(filler: int) -> _Row:
    row = _Row()
    row.read([filler], version=0)
    return row


def _as_batch(prompts: Sequence[Sequence[int]], rows: Sequence[_Row], n: int) -> RolloutBatch:
    def padded(columns: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        return pad_sequence([torch.tensor(column, dtype=dtype) for column in columns], batch_first=True)

    mask = padded([row.mask for row in rows], torch.bool)
    versions = padded([row.versions for row in rows], torch.int64)
    newest = versions.max()
    words = [torch.cat([torch.zeros(0, dtype=torch.int32), *row.kept_words]) for row in rows]
    kept = None
    if any(row.kept_words for row in rows):
        counts = pad_sequence([torch.cat(row.kept_counts) for row in rows], batch_first=True)
        kept = KeptTokens(count=counts, words=NonTensorStack(*words), batch_size=[len(rows)])
    return RolloutBatch(
        uid=torch.arange(len(rows)) // n,
        prompt_ids=padded(prompts, torch.int64),
        prompt_length=torch.tensor([len(prompt) for prompt in prompts]),
        response_ids=padded([row.token_ids for row in rows], torch.int64),
        response_length=torch.tensor([len(row.token_ids) for row in rows]),
        response_mask=mask,
        rollout_log_probs=padded([row.log_probs for row in rows], torch.float32),
        truncated=torch.tensor([row.truncated for row in rows]),
        policy_version=versions.masked_fill(~mask, int(newest)).amin(dim=-1),
        token_versions=versions if len(versions[mask].unique()) > 1 else None,
        kept=kept,
        batch_size=[len(rows)],
    )
