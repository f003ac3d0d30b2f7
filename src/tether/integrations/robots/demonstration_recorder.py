"""Records episodes of one environment as demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tether.control.collecting.evaluation import MAX_EPISODE_STEPS
from tether.control.envs.conversion import ActionCodec, ObservationReader, success_of
from tether.control.envs.gymnasium_types import Env, Raw
from tether.control.policies.networks import Act
from tether.integrations.robots.demonstrations import Demonstration
from tether.observations import Array, Observation, copied, recorded

Demonstrator = Callable[[Env, Raw, Observation, bool], Array]
"""(environment, its raw observation, the observation's fields [1, ...], whether an episode begins) -> the next actions
[K, D], encoded as by `tether.control.envs.conversion.ActionCodec`."""

ATTEMPTS = 20
"""Maximum number of episodes that are played per requested one."""


def scripted(function: Callable[[Env, Raw], Raw], codec: ActionCodec) -> Demonstrator:
    """Return a demonstrator that calls a function (environment, observation) -> action; the function may inspect the
    environment."""

    def decide(env: Env, obs: Raw, fields: Observation, first: bool) -> Array:
        return codec.encode(function(env, obs))[None]

    return decide


def of_policy(act: Act, chunk: int, state_width: int, decode: Callable[[Array], Array]) -> Demonstrator:
    """Return a demonstrator that takes a policy's most likely actions.

    Args:
        act: the policy.
        chunk: K, the number of actions per decision.
        state_width: width of the policy's recurrent state.
        decode: converts the policy's output to actions [K, D].
    """
    state = np.zeros((1, state_width), dtype=np.float32)

    def decide(env: Env, obs: Raw, fields: Observation, first: bool) -> Array:
        nonlocal state
        chosen, state = act(fields, None, np.zeros_like(state) if first else state)
        return decode(chosen.reshape(chunk, -1))

    return decide


def record(
    env: Env,
    env_id: str,
    decide: Demonstrator,
    episodes: int,
    seed: int,
    *,
    only_successful: bool = False,
) -> Iterator[Demonstration]:
    """Play episodes, the k-th from the start state of `seed` + k, and yield them with the executed actions.

    Args:
        env: the environment.
        env_id: name of the environment, for error messages.
        decide: the demonstrator.
        episodes: number of episodes to record.
        seed: seed of the start states.
        only_successful: whether to skip episodes in which the task is never solved.

    Raises:
        ValueError: an action does not fit the space, or fewer than `episodes` of `ATTEMPTS` x `episodes` attempts
            succeed.
    """
    codec = ActionCodec.of(env.action_space, env_id)
    recorded_count = 0
    for index in range(ATTEMPTS * episodes):
        episode = _play(env, env_id, codec, decide, seed + index)
        if only_successful and (episode.success is None or not episode.success.any()):
            continue
        yield episode
        recorded_count += 1
        if recorded_count == episodes:
            return
    attempts = ATTEMPTS * episodes
    raise ValueError(f"{env_id}: {recorded_count} of {attempts} episodes succeeded, but {episodes} are requested")


def _play(env: Env, env_id: str, codec: ActionCodec, decide: Demonstrator, seed: int) -> Demonstration:
    read = ObservationReader(env.observation_space, env_id)
    rows, actions, rewards, success = list[Observation](), list[Array](), list[float](), list[bool | None]()
    obs, _ = env.reset(seed=seed)
    ended = False
    while not ended:
        for action in decide(env, obs, read(obs, 1), not rows):
            carried_out = codec.decode(action[None])[0]
            rows.append(copied(read(obs, 1)))
            actions.append(codec.encode(carried_out))
            obs, reward, terminated, truncated, info = env.step(carried_out)
            rewards.append(float(reward))
            success.append(success_of(info, env_id))
            ended = terminated or truncated
            if ended:
                break
        if len(rows) > MAX_EPISODE_STEPS:
            raise ValueError(
                f"{env_id}: an episode has not ended in {MAX_EPISODE_STEPS} steps. Record it with a time limit, "
                "such as gymnasium.wrappers.TimeLimit(env, 1000)"
            )
    solved = np.array([flag is True for flag in success]) if any(flag is not None for flag in success) else None
    seen = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    return Demonstration(recorded(read.layout, seen), np.stack(actions), np.array(rewards, dtype=np.float32), solved)
