"""Promise 5: no dead keys. Every key of the schema is changed, and something that a user can see changes with it.

What a user can see of a key: the plan (`tests.invariants.plan`: all that a built run holds, and what was asked of the
loaders), a metric of a training step, what `tether train` prints and writes, an error, or a note of "no effect".

With the slow tests every key is changed. Without them every key must be read, and those are changed that nothing reads,
that the branch touches, or that are in the twelfth of the commit.
"""

import importlib
import importlib.util
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from copy import deepcopy
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.installed import HAS_MEGATRON, is_installed
from tests.integrations.robots.flow.fake import FakeBackbone
from tests.invariants import situations
from tests.invariants.config_reads import ConfigReads
from tests.invariants.plan import GivenEngine, Loader, OnRanks, Plan, plan_of
from tests.invariants.situations import Situation
from tests.text.servers.stand_in import environment
from tether.commands.build import build
from tether.commands.report import command_to_resume, show_report
from tether.commands.train import train
from tether.config import ConfigError, LoadedConfig, control_defaults, live_keys, load_config
from tether.config.keys import Key, keys, show, values_of
from tether.config.loading.type_errors import expected
from tether.config.support.live_keys import is_off
from tether.config.support.verl_keys import is_unread_section, unread_keys
from tether.distributed import groups
from tether.loop.engine import OptimizerOptions
from tether.metrics.loggers.jsonl import read_metrics
from tether.runtime.terminal import Screen
from tether.text import inputs
from tether.text.learning import build as learners
from tether.text.learning.engines import fsdp
from tether.text.learning.packing import MicroBatching
from tether.text.rewards import build as rewards
from tether.text.rewards.service.pool import RewardPool

# --- one key in one situation -------------------------------------------------------------------------------------


def candidates(key: Key, now: object, situation: Situation) -> list[str]:
    """Other legal values of a key, as they are written in an override."""
    if key.path in situation.others:
        return situation.others[key.path]
    if isinstance(now, bool):
        return [str(not now)]
    if key.choices:
        chosen = now if isinstance(now, tuple) else (now,)
        others = [choice for choice in key.choices if choice not in chosen]
        return [choice for choice in others if choice in key.allowed] or others
    if isinstance(now, tuple) and all(isinstance(item, float) for item in now):
        return [show([0.5 * item for item in now])]
    if isinstance(now, int) or (now is None and "whole number" in key.type_text):
        return [str((now or 0) + 1), str((now or 0) + 4)]
    if isinstance(now, float) or (now is None and "number" in key.type_text):
        return [str(0.5 * now if now else 0.5)]
    return ["{other: 1}"] if key.is_mapping else ["[7]" if "list or null" in key.type_text else "other"]


def switched_on(path: str, situation: Situation) -> list[str]:
    """Overrides that switch a key on, where a switch of its own decides."""
    switch = keys()[path].acts_if
    if switch is None or not is_off(switch, values_of(load(*situation.base).config)):
        return []
    refused = keys()[switch.key].refuses
    on = [value for value in switch.on or () if refused is None or value not in refused.choices]
    value = show(on[0]) if on else candidates(keys()[switch.key], (switch.off or (None,))[0], situation)[0]
    return [*switched_on(switch.key, situation), f"{switch.key}={value}"]


def in_context(path: str, situation: Situation) -> tuple[str, ...]:
    """A command line on which a key acts."""
    return (*situation.base, *switched_on(path, situation), *situation.context.get(path, []))


@cache
def load(*overrides: str) -> LoadedConfig:
    return load_config(None, overrides)


@cache
def sight(observe: Callable[[LoadedConfig], object], overrides: tuple[str, ...]) -> object:
    return observe(load(*overrides))


def effect(path: str, situation: Situation, observe: Callable[[LoadedConfig], object]) -> str | None:
    """The visible effect of changing a key: "changed", "error", "noted" or "refused"; None: nothing.

    Where some values are taken silently and without effect, and no value has one, it is None.
    """
    context = in_context(path, situation)
    before, before_seen = load(*context), sight(observe, context)
    silent, said = False, None
    for value in candidates(keys()[path], values_of(before.config)[path], situation):
        try:
            after = load(*context, f"{path}={value}")
        except ConfigError as error:
            said = refusal(path, error)
            continue
        if any(f"{path}=" in note for note in after.notes if note not in before.notes):
            said = "noted"
            continue
        try:
            if observe(after) != before_seen:
                return "changed"
            silent = True
        except ValueError as error:
            return named(path, error)
    return None if silent else said


def refusal(path: str, error: ConfigError) -> str:
    """Read a refusal, which must be of this key, and of its value, not its type: that would prove nothing."""
    wrong_type = f"is not {expected(keys()[path])}"
    assert not any(problem.what.endswith(wrong_type) for problem in error.problems), str(error)
    return named(path, error) and "refused"


def named(path: str, error: ValueError) -> str:
    assert path in str(error), f"{path} is not named: {error}"
    return "error"


# --- what is observed ---------------------------------------------------------------------------------------------


class KeptPool(RewardPool):
    """Stays open when a run is closed, for the next one."""

    def close(self) -> None:
        pass


class Bench:
    """Builds runs quickly, one after the other."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pools = Loader(KeptPool, keep=lambda pool: pool)
        self.loaders = [self.pools]
        patch.setattr(rewards, "RewardPool", self.pools)
        patch.setattr(groups, "_start_group", OnRanks)
        self.alone = not dist.is_initialized()
        if self.alone:  # what a rank of control policies is built with
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        patch.setattr(fsdp, "FsdpEngine", GivenEngine)
        if HAS_MEGATRON:
            patch.setattr(importlib.import_module("tether.integrations.megatron.engine"), "MegatronEngine", GivenEngine)
        patch.setattr(
            importlib.import_module("tether.integrations.robots.flow.backbone"), "make_backbone", FakeBackbone
        )
        for module, name, keep in (
            (learners, "load_causal_lm", deepcopy),
            (learners, "load_critic", deepcopy),
            (rewards, "load_reward_model", deepcopy),
            (inputs, "load_tokenizer", deepcopy),
            *([(importlib.import_module("tether.control.envs.make"), "make_vector_env", None)] if HAS_ENVS else []),
        ):
            loader = Loader(getattr(module, name), keep)
            patch.setattr(module, name, loader)
            self.loaders.append(loader)

    def build(self, loaded: LoadedConfig) -> Any:
        for loader in self.loaders:
            loader.asked.clear()
        return build(loaded)

    def plan(self, loaded: LoadedConfig) -> Plan:
        run = self.build(loaded)
        run.close()
        return plan_of(run, loaded) | {loader.load.__name__: str(loader.asked) for loader in self.loaders}

    def step(self, loaded: LoadedConfig) -> dict[str, float | str]:
        """The metrics of one training step."""
        run = self.build(loaded)
        trainer = run.trainer
        trainer.rollouts.begin(0)
        metrics = trainer.advance()
        run.close()
        return untimed(metrics)

    def close(self) -> None:
        for pool in self.pools.kept.values():
            RewardPool.close(pool)
        if self.alone:
            dist.destroy_process_group()


def command(loaded: LoadedConfig) -> tuple[object, ...]:
    """The words that `tether train` prints, what it measures, and the files that it writes."""
    folder = Path(loaded.config.trainer.default_local_dir)
    printed = StringIO()
    shutil.rmtree(folder, ignore_errors=True)
    with redirect_stdout(printed):
        result = train(loaded)
        resumes = command_to_resume("tether train", loaded, result.step, result.total_steps)
        show_report(result.folder, Screen(), resumes)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    metrics = {step: untimed(values) for step, values in read_metrics(folder).items()}
    shutil.rmtree(folder)
    return set(re.findall(r"[a-z_/]{3,}", printed.getvalue())), metrics, files


def untimed(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Without what depends on the clock; NaN, which differs from itself, as text."""
    return {
        key: "nan" if math.isnan(value) else value
        for key, value in metrics.items()
        if not key.startswith(("timing_", "perf/", "reward/call_s/"))
    }


HAS_ENVS = importlib.util.find_spec("gymnasium") is not None
needs_envs = pytest.mark.skipif(not HAS_ENVS, reason="embodied runs need gymnasium")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def situation(folder: Path) -> Situation:
    return situations.text(folder)


@pytest.fixture(scope="module")
def control(folder: Path) -> Situation:
    importlib.import_module("tests.control.envs.toys").register()
    return situations.control(folder)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        bench = Bench(patch)
        yield bench
        bench.close()


@pytest.fixture(scope="module", autouse=True)
def _in_a_folder_of_its_own(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind in ("vllm", "sglang"):
            patch.setenv(f"TETHER_{kind.upper()}", str(environment(folder / kind, kind=kind)))
        yield


# --- which keys are looked at in the default selection ------------------------------------------------------------


def git(*arguments: str) -> str:
    """Return what git says of this checkout; nothing where there is none."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def fields_of_this_change() -> set[str]:
    """Return the fields of the schema whose line differs from the branch that this one left, or was not committed."""
    base = git("merge-base", "HEAD", "origin/main") or git("merge-base", "HEAD", "main") or "HEAD"
    sections = (":/src/tether/config/schema", ":(top,glob)src/tether/**/config.py", ":/tether/config/schema")
    changes = git("diff", "-M", "--unified=0", base, "--", *sections)
    return set(re.findall(r"^[-+] +(\w+): ", changes, re.MULTILINE))


ROUNDS = 12
ROUND = int(git("rev-parse", "HEAD")[:8] or "0", 16) % ROUNDS
"""Which twelfth of the keys is changed without `-m slow`, by the commit: the same one when a run is repeated."""
CHANGED = fields_of_this_change()


def cases(paths: Iterable[str]) -> list[Any]:
    """Return the keys as parameters: slow but for those of this change and a twelfth of the others."""
    now = [path for i, path in enumerate(live_keys()) if i % ROUNDS == ROUND or path.rpartition(".")[2] in CHANGED]
    return [pytest.param(path, marks=() if path in now else pytest.mark.slow) for path in paths]


def is_read_by_text_runs(path: str) -> bool:
    while (switch := keys()[path].acts_if) is not None:
        path = switch.key
    return path != control_defaults.SWITCH


OF_TEXT = [path for path in live_keys() if is_read_by_text_runs(path)]
ONLY_OF_LARGE_MODELS = {"trainer.check_memory"}
"""Keys without effect where the run fits into memory; tests/plan/test_comparison.py shows theirs."""
EMBODIED = [path for path in live_keys() if keys()[path].in_embodied]


# --- the promise --------------------------------------------------------------------------------------------------


def unread(paths: Iterable[str], situation: Situation, bench: Bench) -> list[str]:
    """Return the keys that nothing reads, of a run that takes steps or of one that is built in their context."""
    with pytest.MonkeyPatch.context() as patch:
        reads = ConfigReads(patch)
        command(reads.of(load(*situation.base)))
        built = set()
        for path in paths:
            if path not in reads.keys and (context := in_context(path, situation)) not in built:
                bench.plan(reads.of(load(*context)))
                built.add(context)
    return [path for path in paths if path not in reads.keys]


def is_dead(path: str, situation: Situation, bench: Bench) -> bool:
    return not any(effect(path, situation, look) for look in (bench.plan, bench.step, command))


def dead(request: pytest.FixtureRequest) -> str:
    again = f"python -m pytest -n 0 -m '' '{request.node.nodeid}'"
    return f"a dead key: nothing that a user can see depends on it. Only this one again: {again}"


@pytest.fixture(scope="module")
def unread_by_text_runs(situation: Situation, bench: Bench) -> list[str]:
    return unread([path for path in OF_TEXT if not missing_packages(path)], situation, bench)


def test_every_live_key_is_read_or_has_an_effect(
    unread_by_text_runs: list[str], situation: Situation, bench: Bench
) -> None:
    """The quick look at all keys. One that is read and then dropped is found by the tests below."""
    assert len(unread_by_text_runs) < 0.1 * len(OF_TEXT)
    assert [path for path in unread_by_text_runs if is_dead(path, situation, bench)] == []


@needs_envs
def test_every_live_key_is_read_or_has_an_effect_on_embodied_runs(control: Situation, bench: Bench) -> None:
    paths = [path for path in EMBODIED if not missing_packages(path)]
    assert [path for path in unread(paths, control, bench) if is_dead(path, control, bench)] == []


def missing_packages(path: str) -> list[str]:
    """The packages that a key needs to act and that are not there."""
    needs = {
        "megatron-core": ".megatron." in path,
        "envpool": path in ("env.train.num_workers", "env.eval.num_workers"),
        "peft": ".lora_" in path or path.endswith((".target_modules", ".exclude_modules")),
        "imageio-ffmpeg": ".video_cfg." in path,
        "pygame": ".video_cfg." in path,
    }
    return [package for package, is_needed in needs.items() if is_needed and not is_installed(package)]


def skip_without_packages(path: str) -> None:
    if missing := missing_packages(path):
        pytest.skip(f"needs {', '.join(missing)}")


@pytest.mark.parametrize("path", cases(path for path in OF_TEXT if path not in ONLY_OF_LARGE_MODELS))
def test_a_live_key_has_an_effect(
    path: str, situation: Situation, bench: Bench, request: pytest.FixtureRequest
) -> None:
    skip_without_packages(path)
    assert not is_dead(path, situation, bench), dead(request)


@needs_envs
@pytest.mark.parametrize("path", cases(EMBODIED))
def test_a_live_key_has_an_effect_on_embodied_runs(
    path: str, control: Situation, bench: Bench, request: pytest.FixtureRequest
) -> None:
    skip_without_packages(path)
    assert not is_dead(path, control, bench), dead(request)


def test_looking_twice_shows_the_same(situation: Situation, bench: Bench) -> None:
    """Otherwise everything above would pass."""
    loaded = load(*situation.base)
    for look in (bench.plan, bench.step, command):
        assert look(loaded) == sight(look, tuple(situation.base))
    served = (*situation.base, *situation.context.get("actor_rollout_ref.rollout.parity_freq", []))
    assert bench.plan(load(*served)) == sight(bench.plan, served)


@needs_envs
def test_looking_twice_at_an_embodied_run_shows_the_same(control: Situation, bench: Bench) -> None:
    test_looking_twice_shows_the_same(control, bench)


def test_every_key_of_the_schema_is_live_or_a_second_name() -> None:
    """A key that nothing reads has no field: it is a row of `verl_keys.toml`."""
    assert set(live_keys()) == {path for path, key in keys().items() if not key.alias_of}
    assert not set(keys()) & set(unread_keys())


def test_a_key_that_nothing_reads_is_refused_or_said_to_have_no_effect(situation: Situation) -> None:
    own = [path for path, row in unread_keys().items() if not row.is_translated and not is_unread_section(path)]
    values = {path: "one" if path.endswith("save_contents") else "other" for path in own}
    settings = {path: f"+{path}={value}" for path, value in values.items()}
    with pytest.raises(ConfigError) as error:
        load(*situation.base, *settings.values())
    refused = {problem.path for problem in error.value.problems}
    taken = load(*situation.base, *(settings[path] for path in settings if path not in refused))
    notes = "\n".join(taken.notes)
    assert len(refused) > 100
    assert [path for path in settings if path not in refused and f"{path}={values[path]}" not in notes] == []
    without = load(*situation.base)
    assert taken.config == without.config
    assert len(taken.notes) > len(without.notes)


def test_a_key_that_nothing_reads_would_show(situation: Situation, bench: Bench, monkeypatch) -> None:
    """The negative control: batch sizes that do nothing (verl #1028), a seed or a rate that is read from elsewhere."""
    deaf = {
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": ("micro_batching", MicroBatching(max_rows=8)),
        "actor_rollout_ref.actor.optim.betas": ("optimizer_options", OptimizerOptions(lr=1e-2)),
    }
    sight.cache_clear()
    for _, (builder, always) in deaf.items():
        monkeypatch.setattr(learners, builder, lambda *_, always=always, **__: always)
    # The other key is read, for a check, and acts on nothing: only its effect shows that.
    assert unread(deaf, situation, bench) == ["actor_rollout_ref.actor.optim.betas"]
    assert [effect(path, situation, look) for path in deaf for look in (bench.plan, bench.step)] == [None] * 4
    sight.cache_clear()


def test_a_second_name_is_the_key_itself(situation: Situation) -> None:
    base = load(*situation.base)
    for path in keys():
        if (key := keys()[path].alias_of) is not None:
            value = candidates(keys()[key], values_of(base.config)[key], situation)[0]
            named, itself = (load(*situation.base, f"~{key}", f"{name}={value}").tree() for name in (path, key))
            assert named == itself != base.tree(), path
