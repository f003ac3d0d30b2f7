"""A control policy that is asked for actions: observations as an environment gives them, actions as it takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from tether.envs import Flags
from tether.envs.gymnasium_types import Raw, Space
from tether.envs.spaces.actions import ActionCodec
from tether.envs.spaces.observations import ObservationReader
from tether.models.control import Policy
from tether.observations import ACTION_MASK, Array
from tether.rollout.env.episodes import NOTHING_ALLOWED, allows_nothing


class Agent:
    """Acts for one environment, or for N at once, and remembers what a policy with a memory or with chunks has to.

    Args:
        policy: that decides.
        observations: space of one environment.
        actions: space of one environment.
        env_id: for messages.
        decode: makes numbers of the policy's choices [..., D], where it chooses action tokens.
        seed: of the noise of `predict` with ``deterministic=False``.
    """

    def __init__(
        self,
        policy: Policy,
        observations: Space,
        actions: Space,
        env_id: str,
        decode: Callable[[Array], Array] | None = None,
        seed: int = 0,
    ) -> None:
        self._policy, self._act = policy, policy.acting()
        self._space, self._codec = observations, ActionCodec.of(actions, env_id)
        self._read = ObservationReader(observations, env_id)
        self._decode = decode
        self._chunk = policy.spec.num_action_chunks
        self._generator = torch.Generator().manual_seed(seed)
        self.reset()

    def reset(self) -> None:
        """Begin new episodes everywhere, in as many environments as the next call shows."""
        self._state = np.zeros((0, self._policy.state_width), dtype=np.float32)
        self._chosen = np.zeros((0, self._chunk, 0))
        self._carried_out = np.zeros(0, dtype=np.int64)

    def predict(
        self, observation: Raw, *, deterministic: bool = True, begins: bool | Sequence[bool] | Flags = False
    ) -> object:
        """The next action, in the environment's action space; of a batch of observations one for each row.

        Args:
            observation: of one environment; or a batch: arrays with one more axis in front, for Dict and Tuple spaces
                in each part.
            deterministic: the likeliest action; else one is drawn.
            begins: an episode begins with this observation; for a batch also one flag a row. Policies that remember
                nothing and decide on single actions need not be told.

        Raises:
            ValueError: the observation does not fit the space, holds a number that is not finite or a mask that allows
                nothing, or has another number of rows than the last one while the policy remembers something.
        """
        rows = batch_size(self._space, observation)
        count = 1 if rows is None else rows
        parts = self._read(observation, count)
        for name, part in parts.items():
            if part.dtype.kind == "f" and not np.isfinite(part).all():
                row, entry = np.argwhere(~np.isfinite(part))[0]
                raise ValueError(
                    f"observation: entry {entry} of {name} in row {row} is {part[row, entry]}; give finite numbers"
                )
        if ACTION_MASK in parts and (choices := self._policy.spec.choices):
            stuck = allows_nothing(parts[ACTION_MASK], choices)
            if stuck.any():
                raise ValueError(f"observation: {NOTHING_ALLOWED} in row {int(np.argmax(stuck))}; allow one of them")
        self._begin(count, np.broadcast_to(np.asarray(begins, dtype=np.bool_), (count,)))
        asked = self._carried_out == self._chunk
        if asked.any():
            noise = None
            if not deterministic:
                noise = self._policy.head.noise((count,), self._generator).numpy()
            chosen, state = self._act(parts, noise, self._state)
            chosen = chosen.reshape(count, self._chunk, -1)
            if self._chosen.shape != chosen.shape:
                self._chosen = np.zeros_like(chosen)
            self._chosen[asked], self._state[asked] = chosen[asked], state[asked]
            self._carried_out[asked] = 0
        columns = self._chosen[np.arange(count), self._carried_out]
        self._carried_out += 1
        actions = self._codec.decode(columns if self._decode is None else self._decode(columns))
        return actions[0] if rows is None else actions

    def _begin(self, count: int, begins: NDArray[np.bool_]) -> None:
        remembers = self._state.shape[1] > 0 or self._chunk > 1
        before = len(self._carried_out)
        if before != count:
            if before and remembers and not begins.all():
                raise ValueError(
                    f"observation: {count} rows, after {before}, and the policy remembers those. Call reset(), or say "
                    "begins=True, when other episodes begin."
                )
            self._state = np.zeros((count, self._state.shape[1]), dtype=np.float32)
            self._carried_out = np.full(count, self._chunk)
        self._state[begins] = 0.0
        self._carried_out[begins] = self._chunk


def batch_size(space: Space, observation: Raw, name: str = "observation") -> int | None:
    """Rows of a batch of observations of a space; None for a single one.

    Raises:
        ValueError: it is neither; names the part, its shape and those that fit.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = dict(space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces))
        try:
            parts = [batch_size(part, observation[key], f"{name}[{key!r}]") for key, part in inner.items()]
        except (KeyError, IndexError, TypeError) as error:
            without = f"{type(observation).__name__} without all of {', '.join(map(str, inner))}"
            raise ValueError(f"{name}: {without}; the space is {space}") from error
        if len(set(parts)) > 1:
            raise ValueError(f"{name}: its parts have {parts} rows (None: no batch); give all of them the same")
        return parts[0]
    shape, found = space.shape or (), np.shape(observation)
    if found == shape:
        return None
    if found[1:] == shape and len(found) == len(shape) + 1 and found[0] > 0:
        return int(found[0])
    raise ValueError(f"{name}: shape {found}; give {shape}, or {('N', *shape)} for N environments at once")
