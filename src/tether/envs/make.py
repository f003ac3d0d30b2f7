"""From the id of an environment to a vector of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
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

from tether.envs.adapters.minigrid import SuccessByReward
from tether.envs.gymnasium_types import Arguments, Begun, Env, Info, Scripted, Simulator, Wrapper
from tether.envs.protocol import VectorEnv
from tether.envs.spaces.action_masks import MaskedActions
from tether.envs.spaces.observations import ObservationReader
from tether.envs.vectorization.answers import FIX, described
from tether.envs.vectorization.episode_starts import PacedEnv
from tether.envs.vectorization.gymnasium_vector import GymnasiumVectorEnv
from tether.envs.vectorization.loop import SyncVectorEnv
from tether.envs.vectorization.part import PartOfEnvs
from tether.envs.vectorization.subprocesses import WorkerVectorEnv
from tether.envs.vectorization.timed import TimedEnv
from tether.runtime.late_calls import LateCalls
from tether.runtime.objects import held, is_object
from tether.runtime.user_files import definition, import_python_file
from tether.spelling import did_you_mean

EXTRAS = {
    "mujoco": "mujoco", "imageio": "mujoco", "envpool": "envpool", "pygame": "video", "minigrid": "minigrid",
    "Box2D": "box2d", "gymnasium_robotics": "robotics", "metaworld": "metaworld", "mani_skill": "maniskill",
    "libero": "libero",
}  # fmt: skip
"""Module that an environment could not import -> extra of tether that brings it."""

ADAPTERS = {
    "libero": "tether.envs.adapters.libero",
    "maniskill": "tether.envs.adapters.maniskill",
    "metaworld": "tether.envs.adapters.metaworld",
}
"""env_type -> module that makes single environments of a simulator with ids of its own: `make_env`."""

SCRIPTED = ("metaworld",)
"""Of these, those whose module has `scripted`: (environment, observation) -> action."""

MODULES = {"MiniGrid-": "minigrid", "BabyAI-": "minigrid"}
"""Beginning of ids -> module that registers them."""

TAKEN_BY_GYMNASIUM = frozenset(
    {"id", "max_episode_steps", "disable_env_checker", "num_envs", "vectorization_mode", "vector_kwargs", "wrappers"}
)
"""Arguments of `gymnasium.make` and `gymnasium.make_vec`, which never reach a constructor."""


@dataclass(frozen=True)
class View:
    """Which of an environment's observations a policy sees, and what else of a step is kept."""

    drop: tuple[str, ...] = ()
    """Parts of a Dict that are left out."""
    frame_stack: int = 1
    """Observations of so many last steps together."""
    action_masks: bool | None = None
    """Show ``info["action_mask"]`` as a part; None: refuse environments that have it."""
    info_metrics: tuple[str, ...] = ()
    """Numbers in the info of an episode's last step that are kept."""


@dataclass(frozen=True)
class Pacing:
    """When episodes begin, and in which states; see `tether.envs.vectorization.episode_starts`."""

    chunk: int = 1
    auto_reset: bool = True
    group_size: int = 1
    fixed_seed: int | None = None


@dataclass(frozen=True)
class EnvOptions:
    """Which environments, how many, and how they are stepped; the keys of ``env.train`` and ``env.eval``."""

    id: str
    num_envs: int
    env_type: str = "gymnasium"
    vectorization: str = "auto"
    num_workers: int = 1
    timeout: float = 300.0
    """Seconds that a step or a reset may take."""
    max_episode_steps: int | None = None
    ignore_terminations: bool = False
    init_params: Arguments = field(default_factory=dict)
    wrappers: tuple[str, ...] = ()
    """``module:Class`` of wrappers around each environment, the first innermost; with ``?name=value`` for arguments."""
    view: View = field(default_factory=View)
    pacing: Pacing = field(default_factory=Pacing)
    role: str = "env.train"
    """Section of the configuration, for messages."""
    first: int = 0
    """Number of the first environment, where those of a run are divided among processes."""


class SeedsByMethod(Wrapper):
    """Hands the seed of a reset to ``seed()``, the older way, where environments (MetaWorld's) ignore it otherwise."""

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> Begun:
        """See `gymnasium.Env.reset`."""
        if seed is not None:
            unwrapped: Simulator = self.unwrapped
            unwrapped.seed(seed)
        return self.env.reset(seed=seed, options=options)


def make_vector_env(options: EnvOptions) -> VectorEnv:
    """Make `num_envs` environments of an id.

    Raises:
        ValueError: the id is unknown, what it needs is not installed, it does not take the arguments, or no policy fits
            its spaces.
    """
    in_processes = options.vectorization == "subprocess" and options.env_type != "envpool"
    with _needs_named(options):
        if not in_processes:
            _check_own(options)
        env = _make(options)
    if options.first and options.pacing == Pacing():  # else the pacing knows the numbers
        part: Any = PartOfEnvs(env, options.first)
        env = part
    if in_processes:
        return env  # they have the deadline
    timed: Any = TimedEnv(env, options.timeout, options.role)
    return timed


def _make(options: EnvOptions) -> VectorEnv:
    if options.env_type == "envpool":
        adapter = importlib.import_module("tether.envs.adapters.envpool")
        return adapter.make_envpool(options)
    if options.env_type == "maniskill" and (batch := _adapter(options).make_batch(options, _arguments(options))):
        return batch
    return _make_gymnasium(options) if options.env_type == "gymnasium" else _make_loop(options)


def _make_gymnasium(options: EnvOptions) -> VectorEnv:
    spec = _find(options)
    paced = options.pacing != Pacing()
    needs_loop = paced or options.ignore_terminations or bool(options.wrappers) or options.view != View()
    own_code = spec.vector_entry_point is not None and not needs_loop
    if spec.entry_point is None:
        _refuse_single_environments(options)
    pays = own_code and (options.num_envs >= 8 or spec.entry_point is None)
    if options.vectorization == "vector" or (options.vectorization == "auto" and pays):
        if not own_code:
            has_none = spec.vector_entry_point is None
            what = "has no vector code of its own" if has_none else f"cannot do what {options.role} asks for"
            raise ValueError(f"{options.role}.vectorization: {options.id} {what}. Use auto, sync or subprocess.")
        return GymnasiumVectorEnv(options.id, _own_vector(options, spec))
    return _make_loop(options)


def _own_vector(options: EnvOptions, spec: EnvSpec) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """Make environments by the vector code of their own."""
    arguments = _arguments(options)
    with _in_time(options):
        vector = gymnasium.make_vec(spec, options.num_envs, vectorization_mode="vector_entry_point", **arguments)
    if vector.num_envs != options.num_envs:
        vector.close()
        raise ValueError(
            f"{options.role}.total_num_envs: {options.num_envs}, but {options.id} always makes {vector.num_envs}. "
            f"Set it to {vector.num_envs}."
        )
    return vector


def has_vector_code_alone(options: EnvOptions) -> bool:
    """Whether an id is registered with vector code and without single environments.

    Raises:
        ValueError: the id is unknown, or what it needs is not installed.
    """
    with _needs_named(options):
        return options.env_type == "gymnasium" and _find(options).entry_point is None


def _refuse_single_environments(options: EnvOptions) -> None:
    """Refuse what only single environments can do for an id that has none.

    Raises:
        ValueError: names the settings.
    """
    needing = {
        f"{options.role}.vectorization={options.vectorization}": options.vectorization in ("sync", "subprocess"),
        f"{options.role}.wrappers": bool(options.wrappers),
        f"{options.role}.ignore_terminations": options.ignore_terminations,
        "a choice of what is seen (drop_observations, frame_stack, action_masks, info_metrics)": options.view != View(),
        "a pacing (num_action_chunks, group_size, auto_reset, use_fixed_reset_state_ids)": options.pacing != Pacing(),
    }
    if "render_mode" in options.init_params:
        needing = {"a video (env.eval.video_cfg.save_video)": True}
    if named := [name for name, needs in needing.items() if needs]:
        raise ValueError(
            f"{options.role}.id: {options.id} has vector code alone, and single environments are needed by "
            f"{' and '.join(named)}. Take that out, and leave {options.role}.vectorization at auto."
        )


def spaces_of(options: EnvOptions) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    """Return the spaces of the observations and actions of one environment.

    Raises:
        ValueError: see `make_vector_env`.
    """
    if has_vector_code_alone(options):
        with closing(_own_vector(options, _find(options))) as vector:
            return vector.single_observation_space, vector.single_action_space
    with closing(make_one(options)) as env:
        return env.observation_space, env.action_space


def _make_loop(options: EnvOptions) -> VectorEnv:
    """Environments that are made and stepped one by one."""
    if options.vectorization == "vector":
        raise ValueError(
            f"{options.role}.vectorization: {options.env_type} has no vector code. Use sync or subprocess."
        )
    if options.vectorization == "subprocess" and is_object(options.id):
        raise ValueError(
            f"{options.role}.vectorization: subprocess, but {options.id} is in this process alone. Use sync, or name "
            "the function as FILE.py:NAME."
        )
    paced = options.pacing != Pacing()
    env: SyncVectorEnv | WorkerVectorEnv
    loop = partial(_loop, options, paced)
    if options.vectorization == "subprocess":
        _import_simulator(options)
        env = WorkerVectorEnv(
            options.id,
            loop,
            options.num_envs,
            options.num_workers,
            make_first=partial(_first_loop, options, paced),
            timeout=options.timeout,
            holds=paced,
            first=options.first,
        )
    else:
        env = loop(options.num_envs)
    return PacedEnv(env, **vars(options.pacing), first=options.first) if paced else env


def _loop(options: EnvOptions, holds: bool, count: int) -> SyncVectorEnv:
    """Some environments in a loop; a module's function, so that it can be sent to a process."""
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
    """The same in the first process, which says what is wrong with the environments."""
    with _needs_named(options):
        _check_own(options)
        return _loop(options, holds, count)


def _import_simulator(options: EnvOptions) -> None:
    """Import what makes the environments: once, before there are processes, which then share it."""
    if options.env_type != "gymnasium":
        _adapter(options)
    elif isinstance(entry := _find(options).entry_point, str):
        with suppress(Exception):  # the first process says so
            load_env_creator(entry)


def _own(options: EnvOptions) -> Callable[..., Any] | None:
    """The user's function that an id names; None: it names a registered environment. Its file is imported."""
    module, _, name = options.id.rpartition(":")
    if is_object(options.id):
        function = held(options.id)
        if not callable(function):
            _refuse_instance(function)
        return cast("Callable[..., Any]", function)
    if not module.endswith(".py"):
        return None
    if name in gymnasium.registry:
        return None
    definitions = vars(import_python_file(module, f"{options.role}.id"))
    if name in gymnasium.registry:  # by the file
        return None
    if not callable(found := definitions.get(name)):
        raise ValueError(
            f"{options.role}.id={options.id}: {module} neither defines nor registers {name!r}."
            f"{did_you_mean(name, [key for key, value in definitions.items() if callable(value)])}"
        )
    return cast("Callable[..., Any]", found)


def _refuse_instance(given: object) -> None:
    """Raise ValueError for what makes no environments."""
    kind = type(given).__name__
    if not isinstance(given, gymnasium.Env | gymnasium.vector.VectorEnv):
        raise ValueError(f"env: {kind} is no function that makes a gymnasium.Env")
    spec = getattr(given, "spec", None)
    named = f", or its id, {spec.id!r}" if isinstance(spec, EnvSpec) else ", or an id"
    kind = type(given.unwrapped).__name__
    raise ValueError(
        f"env: a {kind} that is made already. A run makes several: for training, and others for the preflight and for "
        f"tests. Give its class, or a function that makes a new one at each call{named}."
    )


_alive: WeakValueDictionary[int, object] = WeakValueDictionary()
"""Environments that functions of the user's gave, by their `id`."""


def _new(function: Callable[..., object], where: str, /, **arguments: object) -> object:
    """Call a function of the user's that makes environments.

    Raises:
        ValueError: it gave one that it has given before, whose episodes would be mixed.
    """
    env = function(**arguments)
    if isinstance(env, gymnasium.Env):
        if _alive.get(id(env.unwrapped)) is not None:
            raise ValueError(f"{where}: gives the same environment again. Let it make a new one at each call.")
        _alive[id(env.unwrapped)] = env.unwrapped
    return env


def _check_own(options: EnvOptions) -> None:
    """Where the id names a function of the user's, make one environment by it and take one step.

    Raises:
        ValueError: it is none of Gymnasium's interface.
    """
    if options.env_type == "gymnasium" and (function := _own(options)):
        with _in_time(options):
            _check_function(options, function)


def _named(options: EnvOptions) -> str:
    return f"{options.role}.id={options.id}"


def _check_function(options: EnvOptions, function: Callable[..., object]) -> None:
    where, given = _named(options), dict(options.init_params)
    try:
        env = _new(function, where, **given)
    except (Exception, SystemExit) as error:  # whatever a user's function raises is one and the same problem
        call = f"a call with {given or 'no arguments'} ({options.role}.init_params)"
        drawn = isinstance(error, TypeError) and "render_mode" in given
        fix = ". A video needs render_mode as an argument, and render()" if drawn else ""
        raise ValueError(f"{where}: {call} raised {type(error).__name__}: {error}{fix}") from error
    if not isinstance(env, gymnasium.Env):
        raise ValueError(f"{where}: gives {type(env).__name__}; expected a gymnasium.Env")
    for name in ("observation_space", "action_space"):
        if not isinstance(space := getattr(env, name, None), gymnasium.Space):
            raise ValueError(f"{where}: its {name} is {space!r:.80}; expected a gymnasium.Space")
    try:
        with closing(env):
            obs, _ = env.reset(seed=0)
            env.action_space.seed(0)
            after, reward, _, _, _ = env.step(env.action_space.sample())
            float(reward)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{where}: reset(seed=0), a step and close() do not give what Gymnasium's do: (observation, info), "
            f"(observation, reward, terminated, truncated, info) and None. {type(error).__name__}: {error}"
        ) from error
    reader = ObservationReader(env.observation_space, where)
    for name, seen in (("reset", obs), ("step", after)):
        try:
            reader(seen, 1)
        except Exception as error:  # whatever cannot be read is one and the same problem
            raise ValueError(
                f"{where}: {name} gives {described(seen)}, which is not in {env.observation_space} ({error}). {FIX}"
            ) from error


def make_one(options: EnvOptions) -> Env:
    """Make one environment as those that `make_vector_env` steps together, which says what it raises."""
    try:
        with _in_time(options):
            if options.env_type == "gymnasium":
                spec = _find(options)
                if spec.entry_point is None:
                    alone = "has vector code alone, so it makes no single environment"
                    raise ValueError(f"{options.role}.id: {options.id} {alone}.")
                env = gymnasium.make(spec, disable_env_checker=True, **_arguments(options))
            else:
                env = _adapter(options).make_env(options, _arguments(options))
    except TypeError as error:
        if "argument" not in str(error) and "render_mode" not in str(error):
            raise  # of its code, not of its call
        key = f"{options.role}.init_params"
        fix = f"Correct the names in {key}={dict(options.init_params)}, or take them all out: ~{key}."
        if "render_mode" in str(error):
            fix = "It shows no pictures: turn env.eval.video_cfg.save_video off."
        raise ValueError(
            f"{options.role}.init_params: {options.id} does not take its arguments ({error}). {fix}"
        ) from error
    if options.id.rpartition(":")[2].startswith(tuple(MODULES)):
        env = SuccessByReward(env)
    for name in options.wrappers:
        env = _wrapped(env, name, options.role)
    _refuse_statistics(env, options)
    env = _seen(env, options)
    return SeedsByMethod(env) if callable(getattr(env.unwrapped, "seed", None)) else env


@contextmanager
def _in_time(options: EnvOptions) -> Iterator[None]:
    """Around a constructor: the deadline of a step counts for it, too."""
    calls = LateCalls(
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
    """The policy that a simulator brings along: (environment, observation) -> action.

    Raises:
        ValueError: it brings none.
    """
    if options.env_type not in SCRIPTED:
        raise ValueError(
            f"{options.role}.env_type: {options.env_type} brings no scripted policies, which {', '.join(SCRIPTED)} "
            "does. Write file.py:function."
        )
    function: Scripted = _adapter(options).scripted
    return function


def _adapter(options: EnvOptions) -> ModuleType:
    return importlib.import_module(ADAPTERS[options.env_type])


def _seen(env: Env, options: EnvOptions) -> Env:
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
    """Put the wrapper ``module:Class`` around an environment; ``?name=value&name=value`` behind it are arguments."""
    key, (path, _, query) = f"{role}.wrappers", name.partition("?")
    module, _, kind = path.partition(":")
    try:
        own = module.endswith(".py")
        wrapper: Any = (
            definition(path, key) if own else getattr(importlib.import_module(module or "builtins"), kind, None)
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


def _refuse_statistics(env: Env, options: EnvOptions) -> None:
    """Refuse wrappers whose running statistics neither a test nor a loaded policy would share."""
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
    """Return what an environment is made with.

    Raises:
        ValueError: Gymnasium would take one of the `init_params` for itself.
    """
    arguments = dict(options.init_params)
    if options.env_type == "gymnasium":
        if _own(options):
            arguments = {name: value for name, value in arguments.items() if name not in TAKEN_BY_GYMNASIUM}
        for name in set(arguments) & TAKEN_BY_GYMNASIUM:
            key = f"{options.role}.init_params.{name}"
            fix = f"Set {options.role}.{name}" if name in vars(options) else "Take it out"
            raise ValueError(f"{key}: Gymnasium takes this name for itself, so {options.id} never gets it. {fix}.")
    if options.max_episode_steps is not None:
        arguments["max_episode_steps"] = options.max_episode_steps
    return arguments


def _find(options: EnvOptions) -> EnvSpec:
    """The registered environment; ``module:Name-v0`` or ``file.py:Name-v0`` imports module or file first.

    Or that of a function: ``file.py:function``, or an object of this process.
    """
    module, _, name = options.id.rpartition(":")
    if function := _own(options):
        hidden = {name: value for name, value in options.init_params.items() if name in TAKEN_BY_GYMNASIUM}
        make: Any = function if isinstance(function, type) else partial(_new, function, _named(options))
        return EnvSpec(name, partial(make, **hidden) if hidden else make)
    module = module or next((module for beginning, module in MODULES.items() if name.startswith(beginning)), "")
    if module and not module.endswith(".py"):
        importlib.import_module(module)
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    known = [
        *gymnasium.registry,
        *(vars(import_python_file(module, f"{options.role}.id")) if module.endswith(".py") else ()),
    ]
    fix = did_you_mean(name, known, count=3) or " gymnasium.pprint_registry() lists those that there are."
    if name.endswith(".py"):
        fix = f" Of a file give {name}:FUNCTION or {name}:ID."
    raise ValueError(f"{options.role}.id: no environment is registered as {name}.{fix}")


@contextmanager
def _needs_named(options: EnvOptions) -> Iterator[None]:
    """A package that is missing is one ValueError that says what to install."""
    try:
        yield
    except (DependencyNotInstalled, ModuleNotFoundError) as error:
        text = f"{error} {error.__cause__ or ''}"
        extra = next((extra for module, extra in EXTRAS.items() if module in text), None)
        fix = f"Run: pip install 'tether[{extra}]'" if extra else "Install it."
        raise ValueError(
            f"{options.role}.id: {options.id} needs a package that is not installed ({error}). {fix}"
        ) from error
