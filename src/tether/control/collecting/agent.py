"""An agent that acts with a control policy: it accepts observations and returns actions of an environment's spaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from tether.control.collecting.collector import NOTHING_ALLOWED, forbids_all_actions
from tether.control.envs.conversion import ActionCodec, ObservationReader
from tether.control.envs.gymnasium_types import Raw, Space
from tether.control.envs.protocol import Flags
from tether.control.policies.mlp_policy import Policy
from tether.observations import ACTION_MASK, Array


class EnvAgent:
    """Acts for one or N environments, and stores the recurrent state and the remaining actions of chunks.

    Args:
        policy: the policy that decides.
        observations: observation space of one environment.
        actions: action space of one environment.
        env_id: name of the environment, for error messages.
        decode: converts the policy's encoded actions [..., D], such as action tokens, to those of the environment.
        seed: seed of the noise of `predict` with ``deterministic=False``.
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
        """Begin new episodes; the next observation determines the number of environments."""
        self._state = np.zeros((0, self._policy.state_width), dtype=np.float32)
        self._chosen = np.zeros((0, self._chunk, 0))
        self._carried_out = np.zeros(0, dtype=np.int64)

    def predict(
        self, observation: Raw, *, deterministic: bool = True, begins: bool | Sequence[bool] | Flags = False
    ) -> object:
        """Return the next action in the environment's action space, or one action for each row of a batch.

        Args:
            observation: an observation of one environment, or a batch: arrays with a leading batch axis, in each field
                of Dict and Tuple spaces.
            deterministic: choose the most likely action instead of sampling.
            begins: whether an episode begins with this observation; for a batch, one flag or one per row. Not needed
                for policies that have no recurrent state and choose single actions.

        Raises:
            ValueError: the observation does not fit the space, has a number that is not finite or a mask that allows
                nothing, or its number of rows changed while the policy has state.
        """
        rows = batch_size(self._space, observation)
        count = 1 if rows is None else rows
        fields = self._read(observation, count)
        for name, field in fields.items():
            if field.dtype.kind == "f" and not np.isfinite(field).all():
                row, entry = np.argwhere(~np.isfinite(field))[0]
                raise ValueError(
                    f"observation: entry {entry} of {name} in row {row} is {field[row, entry]}; give finite numbers"
                )
        if ACTION_MASK in fields and (choices := self._policy.spec.choices):
            stuck = forbids_all_actions(fields[ACTION_MASK], choices)
            if stuck.any():
                raise ValueError(f"observation: {NOTHING_ALLOWED} in row {int(np.argmax(stuck))}; allow one of them")
        self._begin(count, np.broadcast_to(np.asarray(begins, dtype=np.bool_), (count,)))
        needs_decision = self._carried_out == self._chunk
        if needs_decision.any():
            noise = None
            if not deterministic:
                noise = self._policy.head.noise((count,), self._generator).numpy()
            chosen, state = self._act(fields, noise, self._state)
            chosen = chosen.reshape(count, self._chunk, -1)
            if self._chosen.shape != chosen.shape:
                self._chosen = np.zeros_like(chosen)
            self._chosen[needs_decision], self._state[needs_decision] = chosen[needs_decision], state[needs_decision]
            self._carried_out[needs_decision] = 0
        columns = self._chosen[np.arange(count), self._carried_out]
        self._carried_out += 1
        actions = self._codec.decode(columns if self._decode is None else self._decode(columns))
        return next(iter(self._codec.rows(actions))) if rows is None else actions

    def _begin(self, count: int, begins: NDArray[np.bool_]) -> None:
        has_state = self._state.shape[1] > 0 or self._chunk > 1
        before = len(self._carried_out)
        if before != count:
            if before and has_state and not begins.all():
                raise ValueError(
                    f"observation: {count} rows, after {before}, and the policy has state of those. Call reset(), or "
                    "pass begins=True, when other episodes begin."
                )
            self._state = np.zeros((count, self._state.shape[1]), dtype=np.float32)
            self._carried_out = np.full(count, self._chunk)
        self._state[begins] = 0.0
        self._carried_out[begins] = self._chunk


def batch_size(space: Space, observation: Raw, name: str = "observation") -> int | None:
    """Return the number of rows of a batch of observations of a space; None for a single observation.

    Raises:
        ValueError: the shape is of neither; the message names the field, its shape and the valid shapes.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = dict(space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces))
        try:
            sizes = [batch_size(subspace, observation[key], f"{name}[{key!r}]") for key, subspace in inner.items()]
        except (KeyError, IndexError, TypeError) as error:
            without = f"{type(observation).__name__} without all of {', '.join(map(str, inner))}"
            raise ValueError(f"{name}: {without}; the space is {space}") from error
        if len(set(sizes)) > 1:
            raise ValueError(f"{name}: its parts have {sizes} rows (None: no batch); give all of them the same")
        return sizes[0]
    shape, actual = space.shape or (), np.shape(observation)
    if actual == shape:
        return None
    if actual[1:] == shape and len(actual) == len(shape) + 1 and actual[0] > 0:
        return int(actual[0])
    raise ValueError(f"{name}: shape {actual}; give {shape}, or {('N', *shape)} for N environments at once")
