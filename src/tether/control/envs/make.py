"""Makes vector environments from an id and options."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any, cast
from urllib.parse import parse_qsl
from weakref import WeakValueDictionary

import gymnasium
import yaml
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.error import DependencyNotInstalled
from gymnasium.wrappers import FilterObservation, FrameStackObservation, NormalizeObservation, NormalizeReward

from tether.control.envs.action_masks import MaskedActions
from tether.control.envs.config import SELF_RESETTING
from tether.control.envs.conversion import FIX, ObservationReader, check_spaces, convert_step, describe_value
from tether.control.envs.gymnasium_types import Arguments, Begun, Env, Info, Scripted, Simulator, Wrapper
from tether.control.envs.gymnasium_vector import GymnasiumVectorEnv
from tether.control.envs.layers import OffsetSeedEnv, ResetPolicyEnv, TimedEnv
from tether.control.envs.loop import SyncVectorEnv
from tether.control.envs.minigrid import SuccessByReward
from tether.control.envs.protocol import VectorEnv
from tether.control.envs.subprocesses import WorkerVectorEnv
from tether.integrations import integration
from tether.runtime.install import pip_install
from tether.runtime.late_calls import CallWatchdog
from tether.runtime.objects import is_object, registered_object
from tether.runtime.user_files import definition, import_python_file
from tether.spelling import did_you_mean

EXTRAS = {
    "mujoco": "mujoco", "imageio": "mujoco", "envpool": "envpool", "pygame": "video", "minigrid": "minigrid",
    "Box2D": "box2d", "gymnasium_robotics": "robotics", "metaworld": "metaworld", "mani_skill": "maniskill",
    "libero": "libero", "ale_py": "atari", "opencv": "atari", "cv2": "atari", "jax": "jax",
}  # fmt: skip
"""Module that an environment failed to import -> extra of tether that installs it."""

OWN_BATCHES = ("jax", "tensors")
"""The env_types whose id is a user's function that makes batched environments."""

SCRIPTED = ("metaworld",)
"""The env_types whose module has a scripted policy (`scripted`)."""

MAY_BATCH = ("maniskill",)
"""The env_types whose module may step many environments at once (`make_batch`)."""

EVALUATION = "env.eval"
"""Role of the environments for evaluations."""

CLIPPING_WRAPPERS = ("ClipReward", "ClipRewardEnv")
"""Names of wrappers that clip rewards: Gymnasium's and Stable-Baselines3's."""

CLIPPING_ARGUMENTS = ("reward_clipping", "reward_clip")
"""Names of constructor parameters that clip rewards: ale_py's and envpool's."""

NO_PICTURES = "It shows no pictures, which env.eval.video_cfg.save_video and `tether play` need (render_mode)."

MODULES = {"MiniGrid-": "minigrid", "BabyAI-": "minigrid"}
"""Prefix of ids -> module that registers them."""

GYMNASIUM_ARGUMENTS = frozenset(
    {"id", "max_episode_steps", "disable_env_checker", "num_envs", "vectorization_mode", "vector_kwargs", "wrappers"}
)
"""Arguments that `gymnasium.make` and `gymnasium.make_vec` consume, so that they never reach a constructor."""


@dataclass(frozen=True)
class ObservationOptions:
    """The observations that the policy sees, and the numbers to record from infos."""

    drop: tuple[str, ...] = ()
    """Entries of a Dict observation to drop."""
    frame_stack: int = 1
    """Number of most recent observations to stack."""
    action_masks: bool | None = None
    """Whether to add ``info["action_mask"]`` to the observation; None: refuse environments that have one."""
    info_metrics: tuple[str, ...] = ()
    """Names of numbers to record from the info of an episode's last step."""


@dataclass(frozen=True)
class ResetPolicy:
    """Options of `ResetPolicyEnv`: when episodes begin, and in which states."""

    chunk: int = 1
    auto_reset: bool = True
    group_size: int = 1
    fixed_seed: int | None = None


@dataclass(frozen=True)
class EnvOptions:
    """Options of vector environments, from the keys of ``env.train`` or ``env.eval``."""

    id: str
    num_envs: int
    env_type: str = "gymnasium"
    vectorization: str = "auto"
    num_workers: int = 1
    timeout: float = 300.0
    """Maximum seconds for a step, a reset or a constructor."""
    max_episode_steps: int | None = None
    ignore_terminations: bool = False
    init_params: Arguments = field(default_factory=dict)
    wrappers: tuple[str, ...] = ()
    """Wrappers as ``module:Class?name=value``, innermost first."""
    view: ObservationOptions = field(default_factory=ObservationOptions)
    reset_policy: ResetPolicy = field(default_factory=ResetPolicy)
    role: str = "env.train"
    """Section of the configuration, for error messages."""
    first: int = 0
    """Index of the first environment, if the environments of a run are divided among ranks."""


class SeedsByMethod(Wrapper):
    """Passes the seed of a reset to ``seed()`` too, for environments with the older API (MetaWorld)."""

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> Begun:
        if seed is not None:
            unwrapped: Simulator = self.unwrapped
            unwrapped.seed(seed)
        return self.env.reset(seed=seed, options=options)


def make_vector_env(options: EnvOptions) -> VectorEnv:
    """Make `num_envs` environments of an id.

    Raises:
        ValueError: the id is unknown, a package is missing, the arguments are wrong, or no policy supports the spaces.
    """
    in_processes = options.vectorization == "subprocess" and options.env_type != "envpool"
    with _explain_missing_package(options):
        if not in_processes:
            _check_own(options)
        env = _make(options)
    if options.first and options.reset_policy == ResetPolicy():  # otherwise `ResetPolicyEnv` adds the index
        with_offset: Any = OffsetSeedEnv(env, options.first)
        env = with_offset
    if in_processes:
        return env  # the timeout applies in the worker processes
    timed: Any = TimedEnv(env, options.timeout, options.role)
    return timed


def _make(options: EnvOptions) -> VectorEnv:
    if options.env_type == "envpool":
        adapter = importlib.import_module("tether.control.envs.envpool")
        return adapter.make_envpool(options)
    if options.env_type in OWN_BATCHES:
        return _make_batch(options)
    if options.env_type in MAY_BATCH and (batch := _simulator_module(options).make_batch(options, _arguments(options))):
        return batch
    return _make_gymnasium(options) if options.env_type == "gymnasium" else _make_loop(options)


def _make_batch(options: EnvOptions) -> VectorEnv:
    """Make the environments of a user's function that are stepped in one batch, in JAX or with tensors."""
    function, where = _load_user_function(options), _named(options)
    if function is None:
        raise ValueError(
            f"{where}: {options.role}.env_type={options.env_type} takes a function, as FILE.py:NAME or "
            "tether.train(env=...)."
        )
    _refuse_single_environments(options)
    batched = options.env_type == "tensors"
    adapter = importlib.import_module(f"tether.control.envs.{'batched_simulation' if batched else 'jax_envs'}")
    with _constructor_timeout(options):
        arguments = _arguments(options) if batched else dict(options.init_params)
        env: Any = _call_user_function(
            function, where, **({"num_envs": options.num_envs} if batched else {}), **arguments
        )
    if batched:
        return adapter.self_resetting(options.id, env, options.num_envs)
    return adapter.JaxVectorEnv(options.id, env, options.num_envs, options.max_episode_steps)


def _make_gymnasium(options: EnvOptions) -> VectorEnv:
    spec = _find(options)
    manages_resets = options.reset_policy != ResetPolicy()
    needs_loop = (
        manages_resets or options.ignore_terminations or bool(options.wrappers) or options.view != ObservationOptions()
    )
    own_code = spec.vector_entry_point is not None and not needs_loop
    if spec.entry_point is None:
        _refuse_single_environments(options)
    pays = own_code and (options.num_envs >= 8 or spec.entry_point is None)
    if options.vectorization == "auto" and pays and spec.entry_point is not None:
        pays = not spec.additional_wrappers and _has_same_options(options, spec) and _has_same_spaces(options, spec)
    if options.vectorization == "vector" or spec.entry_point is None or (options.vectorization == "auto" and pays):
        if not own_code:
            has_none = spec.vector_entry_point is None
            what = "has no vector code of its own" if has_none else f"cannot do what {options.role} asks for"
            raise ValueError(f"{options.role}.vectorization: {options.id} {what}. Use auto, sync or subprocess.")
        return GymnasiumVectorEnv(options.id, _own_vector(options, spec))
    return _make_loop(options)


def _has_same_options(options: EnvOptions, spec: EnvSpec) -> bool:
    """Whether the vector code of an id behaves like its single environment, as far as constructors show.

    The parameters that both constructors have must have equal values, and the vector code must not have additional
    parameters about rewards. Parameters with different names are not compared.
    """
    assert spec.entry_point is not None
    assert spec.vector_entry_point is not None
    single, vector = (_defaults(entry) | {**spec.kwargs} for entry in (spec.entry_point, spec.vector_entry_point))
    shared = {name for name in vector if name in single} - {"num_envs", "max_episode_steps", "render_mode"}
    adds_rewards = any("reward" in name and name not in single for name in vector)
    same = all(vector[name] == single[name] for name in shared if name not in options.init_params)
    return same and not adds_rewards


def _defaults(entry: str | Callable[..., object]) -> Info:
    """Return the parameters of a constructor that have defaults, with these."""
    make = load_env_creator(entry) if isinstance(entry, str) else entry
    empty = inspect.Parameter.empty
    parameters = inspect.signature(make).parameters
    return {name: each.default for name, each in parameters.items() if each.default is not empty}


def _has_same_spaces(options: EnvOptions, spec: EnvSpec) -> bool:
    with closing(make_one(options)) as env, closing(_own_vector(options, spec)) as vector:
        same = vector.single_observation_space == env.observation_space
        return bool(same and vector.single_action_space == env.action_space)


def _own_vector(options: EnvOptions, spec: EnvSpec) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """Make the vector environment of an id that has vector code of its own."""
    arguments = _arguments(options)
    assert spec.vector_entry_point is not None
    arguments |= disabled_clipping_arguments(options, _defaults(spec.vector_entry_point) | arguments)
    with _constructor_timeout(options), _explain_missing_render_mode():
        vector = gymnasium.make_vec(spec, options.num_envs, vectorization_mode="vector_entry_point", **arguments)
    if vector.num_envs != options.num_envs:
        vector.close()
        raise ValueError(
            f"{options.role}.total_num_envs: {options.num_envs}, but {options.id} always makes {vector.num_envs}. "
            f"Set it to {vector.num_envs}."
        )
    return vector


def is_vector_only(options: EnvOptions) -> bool:
    """Whether an id makes vector environments only: it is registered so, or names a user's function with ``num_envs``.

    Raises:
        ValueError: the id is unknown, or a package is missing.
    """
    with _explain_missing_package(options):
        return options.env_type in OWN_BATCHES or (
            options.env_type == "gymnasium" and _find(options).entry_point is None
        )


def _refuse_single_environments(options: EnvOptions) -> None:
    """Refuse options that require single environments, for an id that makes vector environments only."""
    filmed = "render_mode" in options.init_params  # then the vector environment itself renders
    needing = {
        f"{options.role}.vectorization={options.vectorization}": options.vectorization == "subprocess"
        or (options.vectorization == "sync" and not filmed),
        f"{options.role}.wrappers": bool(options.wrappers),
        f"{options.role}.ignore_terminations": options.ignore_terminations,
        "a choice of what is seen (drop_observations, frame_stack, action_masks, info_metrics)": options.view
        != ObservationOptions(),
        "a pacing (num_action_chunks, group_size, auto_reset, use_fixed_reset_state_ids)": options.reset_policy
        != ResetPolicy(),
    }
    if named := [name for name, needs in needing.items() if needs]:
        raise ValueError(
            f"{options.role}.id: {options.id} has vector code alone, and single environments are needed by "
            f"{' and '.join(named)}. Take that out, and leave {options.role}.vectorization at auto."
        )


def spaces_of(options: EnvOptions) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    """Return the spaces of the observations and actions of one environment.

    Raises:
        ValueError: as in `make_vector_env`.
    """
    with _explain_missing_package(options):
        if options.env_type in OWN_BATCHES:
            with closing(_make_batch(options)) as batch:
                return batch.spaces
        if options.env_type == "envpool":
            one = replace(options, num_envs=1, num_workers=1)
            with closing(importlib.import_module("tether.control.envs.envpool").make_envpool(one)) as pool:
                spaces: tuple[gymnasium.Space[Any], gymnasium.Space[Any]] = pool.spaces
                return spaces
        demanded = options.env_type == "gymnasium" and options.vectorization == "vector"
        if demanded or is_vector_only(options):
            with closing(_own_vector(options, _find(options))) as vector:
                return vector.single_observation_space, vector.single_action_space
        with closing(make_one(options)) as env:
            return env.observation_space, env.action_space


def _make_loop(options: EnvOptions) -> VectorEnv:
    """Make environments that are stepped one by one, in this process or in workers."""
    if options.vectorization == "vector":
        raise ValueError(
            f"{options.role}.vectorization: {options.env_type} has no vector code. Use sync or subprocess."
        )
    if options.vectorization == "subprocess" and is_object(options.id):
        raise ValueError(
            f"{options.role}.vectorization: subprocess, but {options.id} is in this process alone. Use sync, or name "
            "the function as FILE.py:NAME."
        )
    manages_resets = options.reset_policy != ResetPolicy()
    env: SyncVectorEnv | WorkerVectorEnv
    loop = partial(_loop, options, manages_resets)
    if options.vectorization == "subprocess":
        _import_simulator(options)
        env = WorkerVectorEnv(
            options.id,
            loop,
            options.num_envs,
            options.num_workers,
            make_first=partial(_first_loop, options, manages_resets),
            timeout=options.timeout,
            holds=manages_resets,
            first=options.first,
        )
    else:
        env = loop(options.num_envs)
    return ResetPolicyEnv(env, **vars(options.reset_policy), first=options.first) if manages_resets else env


def _loop(options: EnvOptions, holds: bool, count: int) -> SyncVectorEnv:
    """Make a loop over environments. It is a module-level function, because it is pickled for worker processes."""
    make = partial(make_one, options)
    return SyncVectorEnv(
        options.id,
        make,
        count,
        ignore_terminations=options.ignore_terminations,
        holds=holds,
        ignore_masks=options.view.action_masks is False,
        info_metrics=options.view.info_metrics,
    )


def _first_loop(options: EnvOptions, holds: bool, count: int) -> SyncVectorEnv:
    """Make the loop of the first worker, which reports errors in the environments on behalf of all workers."""
    with _explain_missing_package(options):
        _check_own(options)
        return _loop(options, holds, count)


def _import_simulator(options: EnvOptions) -> None:
    """Import the simulator before forking, so that the workers share it."""
    if options.env_type != "gymnasium":
        _simulator_module(options)
    elif isinstance(entry := _find(options).entry_point, str):
        with suppress(Exception):  # the first worker reports the error
            load_env_creator(entry)


def _load_user_function(options: EnvOptions) -> Callable[..., Any] | None:
    """Import the user's file that an id names and return its function; None for a registered environment."""
    module, _, name = options.id.rpartition(":")
    if is_object(options.id):
        function = registered_object(options.id)
        if not callable(function):
            _refuse_instance(function)
        return cast("Callable[..., Any]", function)
    if not module.endswith(".py"):
        return None
    if name in gymnasium.registry:
        return None
    definitions = vars(import_python_file(module, f"{options.role}.id"))
    if name in gymnasium.registry:  # importing the file has registered it
        return None
    if not callable(value := definitions.get(name)):
        raise ValueError(
            f"{options.role}.id={options.id}: {module} neither defines nor registers {name!r}."
            f"{did_you_mean(name, [key for key, value in definitions.items() if callable(value)])}"
        )
    return cast("Callable[..., Any]", value)


def _refuse_instance(obj: object) -> None:
    """Raise a ValueError for an object that is no function, for example an environment."""
    kind = type(obj).__name__
    if not isinstance(obj, gymnasium.Env | gymnasium.vector.VectorEnv):
        raise ValueError(f"env: {kind} is no function that makes a gymnasium.Env")
    spec = getattr(obj, "spec", None)
    named = f", or its id, {spec.id!r}" if isinstance(spec, EnvSpec) else ", or an id"
    kind = type(obj.unwrapped).__name__
    raise ValueError(
        f"env: a {kind} that is made already. A run makes several: for training, and others for the preflight and for "
        f"tests. Give its class, or a function that makes a new one at each call{named}."
    )


_alive: WeakValueDictionary[int, object] = WeakValueDictionary()
"""Live environments made by user functions, by Python `id`."""


def _new_env(function: Callable[..., object], where: str, /, **arguments: object) -> object:
    """Call a user's function that makes an environment.

    Raises:
        ValueError: the function returned an environment that is still in use, so that episodes would be mixed.
    """
    env = function(**arguments)
    if isinstance(env, gymnasium.Env | gymnasium.vector.VectorEnv):
        if _alive.get(id(env.unwrapped)) is not None:
            raise ValueError(f"{where}: gives the same environment again. Let it make a new one at each call.")
        _alive[id(env.unwrapped)] = env.unwrapped
    return env


def _call_user_function(function: Callable[..., object], where: str, /, **arguments: object) -> object:
    """Call a user's function; whatever it raises becomes a ValueError."""
    try:
        return function(**arguments)
    except (Exception, SystemExit) as error:  # user code may raise anything
        if isinstance(error, TypeError) and "render_mode" in str(error):
            raise
        raise ValueError(f"{where}: a call with {arguments} raised {type(error).__name__}: {error}") from error


def _makes_vector_env(function: Callable[..., object]) -> bool:
    """Whether a user's function makes a vector environment: it has the parameter ``num_envs``."""
    if isinstance(function, type):
        return issubclass(function, gymnasium.vector.VectorEnv)
    return "num_envs" in inspect.signature(function).parameters


def _new_vector(function: Callable[..., object], where: str, /, **arguments: object) -> object:
    env = _call_user_function(partial(_new_env, function, where), where, **arguments)
    if not isinstance(env, gymnasium.vector.VectorEnv):
        raise ValueError(
            f"{where}: takes num_envs and gives {type(env).__name__}; expected a gymnasium.vector.VectorEnv. For a "
            "gymnasium.Env leave num_envs out."
        )
    return env


def _check_own(options: EnvOptions) -> None:
    """If the id names a user's function that makes single environments, check one environment by resetting it and
    taking one step."""
    if (
        options.env_type == "gymnasium"
        and (function := _load_user_function(options))
        and not _makes_vector_env(function)
    ):
        with _constructor_timeout(options):
            _check_function(options, function)


def _named(options: EnvOptions) -> str:
    return f"{options.role}.id={options.id}"


def _check_function(options: EnvOptions, function: Callable[..., object]) -> None:
    where, kwargs = _named(options), dict(options.init_params)
    try:
        env = _new_env(function, where, **kwargs)
    except (Exception, SystemExit) as error:  # user code may raise anything
        call = f"a call with {kwargs or 'no arguments'} ({options.role}.init_params)"
        drawn = isinstance(error, TypeError) and "render_mode" in kwargs
        fix = ". A video needs render_mode as an argument, and render()" if drawn else ""
        raise ValueError(f"{where}: {call} raised {type(error).__name__}: {error}{fix}") from error
    if isinstance(env, gymnasium.vector.VectorEnv):
        raise ValueError(f"{where}: gives a VectorEnv, so it has to take their number as the argument num_envs.")
    if not isinstance(env, gymnasium.Env):
        raise ValueError(
            f"{where}: gives {type(env).__name__}; expected a gymnasium.Env, or with an argument num_envs a "
            "gymnasium.vector.VectorEnv"
        )
    check_spaces(where, env, "observation_space", "action_space")
    try:
        with closing(env):
            begun: object = env.reset(seed=0)
            env.action_space.seed(0)
            answer = env.step(env.action_space.sample())
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{where}: reset(seed=0), a step and close() do not give what Gymnasium's do: (observation, info), "
            f"(observation, reward, terminated, truncated, info) and None. {type(error).__name__}: {error}"
        ) from error
    # Unpacking would not notice an observation of two numbers without an info.
    if not isinstance(begun, tuple | list) or len(begun) != 2 or not isinstance(begun[1], Mapping | None):
        raise ValueError(f"{where}: reset gives {describe_value(begun)}, not (observation, info) as Gymnasium's. {FIX}")
    obs, after = begun[0], convert_step(answer, where)[0]
    reader = ObservationReader(env.observation_space, where)
    for name, seen in (("reset", obs), ("step", after)):
        try:
            reader(seen, 1)
        except Exception as error:  # any error means that the observation is not in the space
            raise ValueError(
                f"{where}: {name} gives {describe_value(seen)}, which is not in {env.observation_space} ({error}). "
                f"{FIX}"
            ) from error


def make_one(options: EnvOptions) -> Env:
    """Make one of the environments that `make_vector_env` steps together; errors explain the cause."""
    try:
        with _constructor_timeout(options):
            if options.env_type == "gymnasium":
                spec = _find(options)
                if spec.entry_point is None:
                    alone = "has vector code alone, so it makes no single environment"
                    raise ValueError(f"{options.role}.id: {options.id} {alone}.")
                env = gymnasium.make(spec, disable_env_checker=True, **_arguments(options))
            elif options.env_type in SELF_RESETTING:
                fix = (
                    f" Set it to gymnasium to make {options.id} with Gymnasium."
                    if options.env_type == "envpool"
                    else ""
                )
                raise ValueError(f"{options.role}.env_type: {options.env_type} makes no single environment.{fix}")
            else:
                env = _simulator_module(options).make_env(options, _arguments(options))
    except TypeError as error:
        if "argument" not in str(error) and "render_mode" not in str(error):
            raise  # an error inside the environment, not in the arguments
        key = f"{options.role}.init_params"
        fix = f"Correct the names in {key}={dict(options.init_params)}, or take them all out: ~{key}."
        if "render_mode" in str(error):
            fix = NO_PICTURES
        raise ValueError(
            f"{options.role}.init_params: {options.id} does not take its arguments ({error}). {fix}"
        ) from error
    if options.id.rpartition(":")[2].startswith(tuple(MODULES)):
        env = SuccessByReward(env)
    for name in options.wrappers:
        if not _clips_in_evaluation(options, name):
            env = _wrapped(env, name, options.role)
    _refuse_statistics(env, options)
    env = _apply_observation_options(env, options)
    return SeedsByMethod(env) if callable(getattr(env.unwrapped, "seed", None)) else env


@contextmanager
def _constructor_timeout(options: EnvOptions) -> Iterator[None]:
    """Apply the timeout of a step to a constructor."""
    calls = CallWatchdog(
        options.timeout,
        f"{options.id} took more than {options.role}.timeout={options.timeout:g} s to be made. Raise it",
    )
    calls.begin()
    try:
        yield
    finally:
        calls.end()
        calls.close()


def scripted(options: EnvOptions) -> Scripted:
    """Return a simulator's scripted policy: (environment, observation) -> action.

    Raises:
        ValueError: the simulator has none.
    """
    if options.env_type not in SCRIPTED:
        raise ValueError(
            f"{options.role}.env_type: {options.env_type} brings no scripted policies, which {', '.join(SCRIPTED)} "
            "does. Write file.py:function."
        )
    function: Scripted = _simulator_module(options).scripted
    return function


def _simulator_module(options: EnvOptions) -> ModuleType:
    """Return the module of a simulator, whose `make_env` makes single environments from the simulator's ids."""
    return integration("robots", options.env_type)


def _apply_observation_options(env: Env, options: EnvOptions) -> Env:
    view, space = options.view, env.observation_space
    if view.drop:
        names = list(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else []
        missing = [name for name in view.drop if name not in names]
        if missing:
            has = f"only {', '.join(names)}" if names else "one part only"
            raise ValueError(
                f"env.train.drop_observations: {options.id} shows no {missing[0]}, but {has}. Correct the name, or "
                "set env.train.drop_observations=[]."
            )
        env = FilterObservation(env, [name for name in names if name not in view.drop])
    if view.frame_stack > 1:
        env = FrameStackObservation(env, view.frame_stack)
    return MaskedActions(env) if view.action_masks else env


def _wrapped(env: Env, name: str, role: str) -> Env:
    """Wrap an environment in ``module:Class?name=value&name=value``."""
    key, (path, _, query) = f"{role}.wrappers", name.partition("?")
    module, _, kind = path.partition(":")
    try:
        is_file = module.endswith(".py")
        wrapper: Any = (
            definition(path, key) if is_file else getattr(importlib.import_module(module or "builtins"), kind, None)
        )
    except ModuleNotFoundError as error:
        raise ValueError(f"{key}: {path} needs {error.name}, which is no installed module.") from error
    if not callable(wrapper):
        raise ValueError(f"{key}: {path} is no module:Class. Correct the name.")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        wrapped: Env = wrapper(env, **{argument: yaml.safe_load(value) for argument, value in pairs})
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{key}: {name} does not wrap an environment ({error}). Give its other arguments as numbers or texts: "
            f"{path}?name=value&name=value."
        ) from error
    return wrapped


def _clips_in_evaluation(options: EnvOptions, wrapper: str) -> bool:
    """Whether a wrapper clips rewards and must be left out, because evaluations report unclipped rewards."""
    return options.role == EVALUATION and wrapper.partition("?")[0].rpartition(":")[2] in CLIPPING_WRAPPERS


def disabled_clipping_arguments(options: EnvOptions, arguments: Arguments) -> Info:
    """Return the constructor arguments that turn off the clipping of rewards, for evaluations."""
    return {name: False for name in CLIPPING_ARGUMENTS if options.role == EVALUATION and arguments.get(name) is True}


def describe_preprocessing(options: EnvOptions) -> str:
    """Return a readable description of the preprocessing of observations and rewards in evaluations."""
    clipping = [name for name in options.wrappers if _clips_in_evaluation(options, name)]
    clipping += disabled_clipping_arguments(options, options.init_params)
    used = [f"{name}={value}" for name, value in options.init_params.items() if name not in clipping]
    used += [name for name in options.wrappers if name not in clipping]
    used += [f"frame_stack={options.view.frame_stack}"] if options.view.frame_stack > 1 else []
    used += ["the environment's own vector code"] if options.vectorization == "vector" else []
    without = f" (without {', '.join(clipping)})" if clipping else ""
    return f"{', '.join(used) or 'none'}, rewards as they are{without}"


def _refuse_statistics(env: Env, options: EnvOptions) -> None:
    """Refuse normalizing wrappers, because evaluations and loaded policies would not share their running statistics."""
    layer = env
    while isinstance(layer, gymnasium.Wrapper):
        if isinstance(layer, NormalizeObservation | NormalizeReward) and layer.update_running_mean:
            what = "observations" if isinstance(layer, NormalizeObservation) else "rewards"
            raise ValueError(
                f"{options.role}: {type(layer).__name__} around {options.id} has statistics of its own in each "
                "environment, so the policy would be tested on other numbers than it learned from. Take it out, "
                f"and set policy.normalize_{what}=True: those statistics are saved with the policy."
            )
        layer = layer.env


def _arguments(options: EnvOptions) -> Info:
    """Return the keyword arguments of an environment's constructor."""
    arguments = dict(options.init_params)
    if options.env_type == "gymnasium":
        if _load_user_function(options):
            arguments = {name: value for name, value in arguments.items() if name not in GYMNASIUM_ARGUMENTS}
        for name in set(arguments) & GYMNASIUM_ARGUMENTS:
            key = f"{options.role}.init_params.{name}"
            fix = f"Set {options.role}.{name}" if name in vars(options) else "Take it out"
            raise ValueError(f"{key}: Gymnasium takes this name for itself, so {options.id} never gets it. {fix}.")
    arguments |= disabled_clipping_arguments(options, arguments)
    if options.max_episode_steps is not None:
        arguments["max_episode_steps"] = options.max_episode_steps
    return arguments


def _find(options: EnvOptions) -> EnvSpec:
    """Return the spec of an environment.

    ``module:Name-v0`` and ``file.py:Name-v0`` import the module or file that registers it. A function
    (``file.py:function``, or an object of this process) gets a new spec.
    """
    module, _, name = options.id.rpartition(":")
    function = _load_user_function(options)
    hidden = {name: value for name, value in options.init_params.items() if name in GYMNASIUM_ARGUMENTS}
    if function is not None and _makes_vector_env(function):
        make_vector: Any = partial(_new_vector, function, _named(options), **hidden)
        return EnvSpec(name, vector_entry_point=make_vector)
    if function is not None:
        make: Any = function if isinstance(function, type) else partial(_new_env, function, _named(options))
        return EnvSpec(name, partial(make, **hidden) if hidden else make)
    module = module or next((module for beginning, module in MODULES.items() if name.startswith(beginning)), "")
    if module and not module.endswith(".py"):
        importlib.import_module(module)
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    names = [
        *gymnasium.registry,
        *(vars(import_python_file(module, f"{options.role}.id")) if module.endswith(".py") else ()),
    ]
    fix = did_you_mean(name, names, count=3) or " gymnasium.pprint_registry() lists those that there are."
    if name.endswith(".py"):
        fix = f" Of a file give {name}:FUNCTION or {name}:ID."
    raise ValueError(f"{options.role}.id: no environment is registered as {name}.{fix}")


@contextmanager
def _explain_missing_render_mode() -> Iterator[None]:
    """Turn the error for a constructor without ``render_mode`` into a ValueError."""
    try:
        yield
    except TypeError as error:
        if "render_mode" not in str(error):
            raise
        raise ValueError(NO_PICTURES) from error


@contextmanager
def _explain_missing_package(options: EnvOptions) -> Iterator[None]:
    """Turn the error for a missing package into a ValueError that says what to install."""
    try:
        yield
    except (DependencyNotInstalled, ModuleNotFoundError) as error:
        text = f"{error} {error.__cause__ or ''}"
        extra = next((extra for module, extra in EXTRAS.items() if module in text), None)
        fix = f"Run: {pip_install(extra)}" if extra else "Install it."
        raise ValueError(
            f"{options.role}.id: {options.id} needs a package that is not installed ({error}). {fix}"
        ) from error
