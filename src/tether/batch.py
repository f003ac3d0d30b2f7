"""The data of a training step: typed batches, and the weights that go back to the sampler.

Legend: B = rows (one sampled response each), P = prompt width, T = response width. Rows are right-padded, never
left-padded: row b holds prompt tokens ``prompt_ids[b, :prompt_length[b]]`` and then response tokens
``response_ids[b, :response_length[b]]``. Values beyond a length or outside ``response_mask`` are never read.
Batches are in host memory: engines move what a micro-batch needs to their device.

Worked example, one prompt [5, 6, 7] sampled twice, answers [8, 2] and [9] (2 = end of sequence, width T = 3)::

    uid             [0, 0]                 both rows answer prompt 0 of the step
    prompt_ids      [[5, 6, 7], [5, 6, 7]]
    response_ids    [[8, 2, 0], [9, 0, 0]]
    response_mask   [[1, 1, 0], [1, 0, 0]]
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from tensordict import TensorClass, TensorDict
from torch import Tensor, nn

from tether.types import ExtraInfo

TokenIds = NDArray[np.int32]
Record = TypeVar("Record", bound=Any)


@dataclass(frozen=True, eq=False)
class Prompt:
    """One row of a prompt dataset, ready to be sampled."""

    token_ids: TokenIds
    """The templated prompt, as the policy reads it; any sequence of integers is accepted and converted to an array."""
    data_source: str
    """Name of the dataset, which selects the reward, for example ``openai/gsm8k``."""
    ground_truth: object
    """The reference that the reward compares the response with; None if the reward needs none."""
    messages: tuple[dict[str, object], ...] = ()
    """The conversation before the chat template."""
    extra_info: ExtraInfo = field(default_factory=dict)
    """The row's `extra_info`, passed to the reward unchanged."""
    index: int = 0
    """Row number in the concatenated dataset: the sample's identity in logs."""
    agent_name: str | None = None
    """The agent that replies to the policy between its turns; None: the default of the run."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", as_token_ids(self.token_ids, "Prompt.token_ids"))


def as_token_ids(ids: Sequence[int] | TokenIds, name: str) -> TokenIds:
    """Return an array of token ids; arrays are returned unchanged.

    Raises:
        ValueError: `ids` is not a flat sequence of non-negative integers.
    """
    array = np.asarray(ids)
    integers = array.ndim == 1 and (array.size == 0 or array.dtype.kind in "iu")
    if not integers or (array.size and not 0 <= array.min() <= array.max() < 2**31):
        raise ValueError(f"{name}: {str(ids)[:80]} is no flat list of token ids, which are integers from 0 on.")
    return array.astype(np.int32, copy=False)


def on_device(record: Record, device: torch.device) -> Record:
    """Return a copy of a dataclass with its tensors on a device."""
    tensors = {key: value for key, value in vars(record).items() if isinstance(value, Tensor)}
    return replace(record, **{key: value.to(device) for key, value in tensors.items()})


@dataclass(frozen=True)
class WeightUpdate:
    """The weights of an engine after its last update, as passed to the sampler."""

    version: int
    """Number of updates so far; rows sampled with these weights carry it as `policy_version`."""
    tensors: Iterable[tuple[str, Tensor]]
    """Name and value of each tensor, as in the model's ``state_dict``."""
    is_copy: bool = False
    """Whether the tensors stay unchanged while the engine learns."""

    def copied(self) -> WeightUpdate:
        """Return an update whose tensors stay unchanged while the engine learns."""
        if self.is_copy:
            return self
        seen: dict[tuple[int, torch.Size], tuple[weakref.ref[Tensor], Tensor]] = {}  # tied weights stay tied
        tensors = []
        for name, value in self.tensors:
            key = (value.data_ptr(), value.shape)
            if key not in seen or seen[key][0]() is None:  # the previous tensor at this address was freed
                seen[key] = (weakref.ref(value), value.detach().clone())
            tensors.append((name, seen[key][1]))
        return WeightUpdate(self.version, tensors, is_copy=True)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Load these weights into a model; tensors that already share memory with the model's are not copied."""
        mine = model.state_dict(keep_vars=True)
        for name, theirs in self.tensors:
            if mine[name].data_ptr() != theirs.data_ptr():
                mine[name].copy_(theirs)


INFERRED = {"log_probs": "old_log_probs"} | {
    name: name for name in ("sum_pi_squared", "full_kl", "values", "bootstrap_values", "seen", "routed_experts")
}
"""Field of a model's outputs -> field of the batch."""


def _update_from(batch: TrainBatch | EnvBatch, outputs: object) -> None:
    for name, field_name in INFERRED.items():
        value = getattr(outputs, name, None)  # every tensordict has a method `values`, which is not a field
        if isinstance(value, Tensor | TensorDict):
            setattr(batch, field_name, value)


def filled(field: Tensor | None) -> Tensor:
    """Return a field of a `TrainBatch` that an earlier phase of the step must have computed."""
    assert field is not None, "this phase of the step runs too early"
    return field


def on_last_token(per_row: Float[Tensor, " B"], response_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Return [B, T] with each row's number at its last sampled token and 0 elsewhere."""
    position = torch.arange(response_mask.shape[1], device=response_mask.device)
    last = torch.where(response_mask, position, -1).amax(dim=-1, keepdim=True)
    return torch.where(position == last, per_row[:, None], 0.0)


class KeptTokens(TensorClass["nocast"]):  # type: ignore[type-arg]
    """The candidate tokens left by top-k and top-p, packed (written and read by
    `tether.text.models.truncation_record`).

    The positions of a row are concatenated in its `words`. A position stores its token ids in ascending order, or a bit
    mask of the vocabulary where that is shorter (token v is bit v % 32 of word v // 32), so that it takes
    ``4 + min(4 * count, V / 8)`` bytes. A row of two positions, with a vocabulary of 64 and therefore masks of two
    words::

        kept {5, 9}, then {0, 1, 33}     count [2, 3]     words [5, 9, 0b11, 0b10]
    """

    count: Int[Tensor, "B T"]
    """Number of kept tokens; 0 where nothing was sampled."""
    words: list[Int[Tensor, " W"]]
    """B tensors of int32 of different lengths, so that one row with many candidates does not widen all others."""


class RolloutBatch(TensorClass["nocast", "shadow"]):  # type: ignore[type-arg]
    """Responses and their sampling data from a rollout engine, in host memory."""

    uid: Int[Tensor, " B"]
    """Prompt group: rows with the same uid must have the same prompt, which a micro-batch then stores once."""
    prompt_ids: Int[Tensor, "B P"]
    prompt_length: Int[Tensor, " B"]
    response_ids: Int[Tensor, "B T"]
    response_length: Int[Tensor, " B"]
    response_mask: Bool[Tensor, "B T"]
    """True where the policy itself sampled the token."""
    rollout_log_probs: Float[Tensor, "B T"]
    """Log-probability under the distribution from which the token was actually sampled."""
    truncated: Bool[Tensor, " B"]
    """Whether the response was cut by the length limit instead of ending by itself."""
    policy_version: Int[Tensor, " B"] | None = None
    """Number of updates of the policy when the row was sampled (`WeightUpdate.version`); the smallest one where weights
    changed within the row."""
    token_versions: Int[Tensor, "B T"] | None = None
    """The policy version of each token; None: no weights changed while the batch was sampled."""
    kept: KeptTokens | None = None
    """Candidate tokens left by top-k and top-p; None if neither removed any. Log-probabilities and entropies are
    computed over these candidates."""
    turn_scores: Float[Tensor, "B T"] | None = None
    """Scores of the turns, each on its turn's last token; None: the only score is on the last token of the response."""
    routed_experts: Int[Tensor, "B W L k"] | None = None
    """The experts that routed each token of prompt and response, from the row's first token on, in each decoder layer;
    W = P + T, int16. -1 where unknown, as beyond a row's end and in layers without experts. None: the routers
    choose during training."""


class TrainBatch(RolloutBatch):
    """A rollout with everything that the losses need; the phases of a step compute the optional fields.

    The `response_mask` of rows without a score is all False.
    """

    # Both are always set; the defaults exist because a dataclass requires them after a field with a default.
    token_level_scores: Float[Tensor, "B T"] = None  # type: ignore[assignment]
    """The reward before shaping: for text, the score at the last response token."""
    scored: Bool[Tensor, " B"] = None  # type: ignore[assignment]
    """False where the reward abstained or failed: the row is excluded from all statistics and from the update."""
    old_log_probs: Float[Tensor, "B T"] | None = None
    """Log-probabilities under the policy at the start of the update (the proximal policy)."""
    ref_log_probs: Float[Tensor, "B T"] | None = None
    teacher: Int[Tensor, " B"] | None = None
    """Index of the teacher that computes the `ref_log_probs` of the row; None: all rows have the same reference."""
    full_kl: Float[Tensor, "B T"] | None = None
    """KL from the reference at each token over the whole vocabulary, where the KL penalty on the reward uses it."""
    values: Float[Tensor, "B T"] | None = None  # type: ignore[assignment]
    """The critic's estimate before each response token."""
    token_level_rewards: Float[Tensor, "B T"] | None = None
    """Scores after reward shaping and the KL penalty."""
    sum_pi_squared: Float[Tensor, "B T"] | None = None
    """Sum of squared token probabilities, the chance that two samples agree; used by the optimal token baselines."""
    bootstrap_values: Float[Tensor, " B"] | None = None
    """The critic's estimate after the last token of a truncated response; 0 where the response ended by itself."""
    reward_baselines: Float[Tensor, " B"] | None = None
    """Score of a greedy response to the row's prompt, for `remax`."""
    reward_components: Float[Tensor, "B R"] | None = None
    """The components of the reward, for `gdpo`."""
    advantages: Float[Tensor, "B T"] | None = None
    returns: Float[Tensor, "B T"] | None = None
    rollout_is_weights: Float[Tensor, "B T"] | None = None
    """Importance weights against the sampler, which multiply the policy loss of each token; None: all 1."""
    episode: Int[Tensor, " B"] | None = None
    """Index of the row that represents the row's episode: the row itself, or the main branch if the episode has
    several. Representative rows come first. None: every row is an episode of its own."""
    selected: Bool[Tensor, "B T"] | None = None
    """Tokens that get a different policy loss, selected across a mini-batch (clip_cov, kl_cov, m2po)."""

    @classmethod
    def assemble(cls, rollout: RolloutBatch, scores: Float[Tensor, " B"]) -> TrainBatch:
        """Join a rollout and its rewards.

        Args:
            rollout: the sampled responses.
            scores: [B] one score per response; NaN where the reward abstained or failed.

        The score is placed on the last sampled token, or each turn's score on the turn's last token. Rows without a
        score get a ``response_mask`` of False, so that no statistic and no loss includes them.
        """
        _check_groups(rollout)
        scored = ~torch.isnan(scores) & rollout.response_mask.any(dim=-1)
        mask = rollout.response_mask & scored[:, None]
        if rollout.turn_scores is None:
            placed = on_last_token(scores.where(scored, 0.0), mask)
        else:
            placed = rollout.turn_scores.where(mask, 0.0)
        return cls(
            **{field.name: getattr(rollout, field.name) for field in fields(rollout)} | {"response_mask": mask},
            token_level_scores=placed.to(torch.float32),
            scored=scored,
            batch_size=rollout.batch_size,
        )

    def update_from(self, outputs: object) -> None:
        """Store the outputs of a policy or a critic for these rows; log-probs become `old_log_probs`."""
        _update_from(self, outputs)

    def episodes(self) -> TrainBatch:
        """Return one row per episode, its representative, over which statistics of scores are computed."""
        return self if self.episode is None else self[: int(self.episode.max()) + 1]

    def of_episodes(self, episodes: Int[Tensor, " E"]) -> TrainBatch:
        """Return all rows of the given episodes; an episode may be listed several times."""
        if self.episode is None:
            return self[episodes]
        members = [(self.episode == episode).nonzero()[:, 0] for episode in episodes]
        rows = self[torch.cat(members)]
        rows.episode = torch.cat([torch.full_like(one, index) for index, one in enumerate(members)])
        return rows

    def leave_out(self, rows: Bool[Tensor, " B"]) -> None:
        """Exclude these rows from all statistics and losses, like rows without a score. If a row represents an episode,
        all branches of that episode are excluded."""
        rows = rows if self.episode is None else rows | rows[self.episode]
        self.scored = self.scored & ~rows
        self.response_mask = self.response_mask & ~rows[:, None]
        self.token_level_scores = torch.where(rows[:, None], 0.0, self.token_level_scores)


@dataclass(frozen=True)
class Episode:
    """The outcome of one episode."""

    reward: float
    """Sum of the environment's rewards: the return."""
    length: int
    """Number of steps."""
    success_once: bool | None
    """Whether the task was solved in any step; None if the environment does not report it."""
    success_at_end: bool | None
    """Whether the task was solved in the last step."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the environment reported in the last step."""


@dataclass
class EnvBatch:
    """E rollouts of T steps in N environments: M = E N rows, with everything that the losses need.

    A policy decides on a chunk of K actions at once, so that T = C K for C decisions; R is T, or C where rewards are
    summed over a chunk. The phases of a step compute the optional fields. The next rollout overwrites the buffers.
    """

    obs: TensorDict
    """[M, C + 1, ...]: observations before each decision and after the last step."""
    actions: Tensor
    """[M, C, K * width]: the actions of each chunk, concatenated."""
    token_level_scores: Tensor
    """[M, T]: rewards of the environment, before shaping."""
    terminated: Tensor
    """[M, T]"""
    truncated: Tensor
    """[M, T]"""
    valid: Tensor
    """[M, T]: False where no action was executed."""
    starts: Tensor
    """[M, C + 1]: whether an episode starts at a decision; if it is not executed, the next one is marked too."""
    state: Tensor
    """[M, S]: recurrent state of the policy before the first decision."""
    final_obs: TensorDict
    """[F, ...]: last observations of the episodes whose final value is bootstrapped."""
    final_at: tuple[Tensor, Tensor]
    """[F], [F]: row and step of each of `final_obs`."""
    episodes: tuple[Episode, ...]
    """Episodes that ended during the rollout, in order of their ends."""
    policy_version: int = 0
    """Number of updates of the policy when it acted in this rollout."""
    response_mask: Tensor | None = None
    """[M, T]: steps to learn from."""
    seen: Tensor | TensorDict | None = None
    """`obs` as the networks read them: normalised, and flattened if they need a flat row."""
    old_log_probs: Tensor | None = None
    """[M, C, L]: log-probabilities under the policy at the start of the update; L is 1, K or K * width."""
    rollout_log_probs: Tensor | None = None
    """The same under the policy that acted; None if that is the same policy."""
    values: Tensor | None = None
    """[M, C + 1, V]: the critic's estimates before each decision, or before each of its actions."""
    bootstrap_values: Tensor | None = None
    """[F, V]: the critic's estimates of `final_obs`."""
    token_level_rewards: Tensor | None = None
    """[M, T]: scores after reward shaping."""
    advantages: Tensor | None = None
    """[M, R]"""
    returns: Tensor | None = None
    """[M, R]"""
    success: Tensor | None = None
    """[M, T]: whether the task has been solved at this step or at an earlier one of the row or the episode. None if the
    environments do not report it."""
    seeds: Tensor | None = None
    """[M, C]: seed with which the episode of each decision was reset; -1: no seed or an unknown one. None if the
    environments are reset together."""

    @property
    def chunk(self) -> int:
        """K: number of actions per decision."""
        return self.token_level_scores.shape[1] // self.actions.shape[1]

    def copied(self) -> EnvBatch:
        """Return a copy, which the next rollout does not overwrite."""
        columns: dict[str, Any] = {
            name: value.clone() for name, value in vars(self).items() if isinstance(value, Tensor | TensorDict)
        }
        return replace(self, **columns)

    def select_rows(self, rows: range) -> tuple[EnvBatch, Tensor]:
        """Return a copy of some rows of a rollout, without its episodes, and the indices of their `final_obs`.

        Only fields that a rollout sets are copied.
        """
        row, step = self.final_at
        (finals,) = ((row >= rows.start) & (row < rows.stop)).nonzero(as_tuple=True)
        indices = torch.arange(rows.start, rows.stop)
        names = ("obs", "actions", "token_level_scores", "terminated", "truncated", "valid", "starts", "state")
        columns: dict[str, Any] = {name: getattr(self, name)[indices] for name in names}
        final_at = (row[finals] - rows.start, step[finals])
        return EnvBatch(**columns, final_obs=self.final_obs[finals], final_at=final_at, episodes=()), finals

    @property
    def decided(self) -> Tensor:
        """[M, C]: decisions whose first action was executed."""
        return self.valid[:, :: self.chunk]

    @property
    def carried_out(self) -> tuple[Tensor, Tensor]:
        """[S], [S]: row and decision index of each of the `decided`, in order of time."""
        decision, row = self.decided.T.nonzero(as_tuple=True)
        return row, decision

    def update_from(self, outputs: object) -> None:
        _update_from(self, outputs)


def _check_groups(rollout: RolloutBatch) -> None:
    """Check that rows with the same `uid` have the same prompt, because training computes the prompt once per `uid`."""
    _, group = torch.unique(rollout.uid, return_inverse=True)
    rows = torch.arange(len(group))
    first = torch.full_like(rows, len(group)).scatter_reduce(0, group, rows, "amin")[group]
    beyond = torch.arange(rollout.prompt_ids.shape[1]) >= rollout.prompt_length[:, None]
    same = (rollout.prompt_ids == rollout.prompt_ids[first]) | beyond
    same = same.all(dim=-1) & (rollout.prompt_length == rollout.prompt_length[first])
    assert same.all(), f"uid: rows {rows[~same].tolist()} have other prompts than the first row of their uid"
