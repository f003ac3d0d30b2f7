"""Promise 5: no dead keys. Every key of the schema is changed, and something that a user can see changes with it.

What a user can see of a key: the plan (`tests.invariants.plan`: all that a built run holds, and what was asked of the
loaders), a metric of a training step, what `tether train` prints and writes, an error, or a note of "no effect".
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from tests.invariants.plan import Plan, Remembered, plan_of
from tests.tiny import save_tiny
from tests.trainer.tiny_run import base_overrides, measured, rows, train, write_inputs, write_jsonl
from tether.config import ConfigError, LoadedConfig, live_keys, load_config
from tether.config.elsewhere import ELSEWHERE
from tether.config.keys import Key, keys, show, values_of
from tether.config.patterns import look_up
from tether.config.refused import REFUSED, allowed_choices
from tether.config.switches import SWITCHED
from tether.config.type_errors import expected
from tether.rewards.pool import RewardPool
from tether.trainer.build import Run, build_run, inputs, learners
from tether.trainer.commands import train as train_command
from tether.training.micro_batches import MicroBatching
from tether.training.optimizer import OptimizerOptions

LOADERS = (
    (learners, "load_causal_lm"),
    (learners, "load_critic"),
    (inputs, "load_tokenizer"),
    (inputs, "RewardPool"),
)
CLOCKS = ("timing_", "perf/", "reward/call_s/")
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, weight=1.0):
    letters = sum(c.isalpha() for c in solution_str)
    return {"score": weight * letters / 8, "acc": float(letters > 2)}

other_score = compute_score
"""
DATASETS = """
import json

class First:
    def __init__(self, *, data_files, tokenizer, config):
        self.rows = [json.loads(line) for line in open(data_files[0])]
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        return self.rows[index]

class Second(First):
    def __getitem__(self, index):
        return self.rows[-1 - index]
"""


@dataclass(frozen=True)
class Situation:
    """Files to name, and the command line that every key is changed on."""

    folder: Path

    @property
    def base(self) -> list[str]:
        return [
            *base_overrides(self.folder, self.folder / "run"),
            "algorithm.adv_estimator=gae",
            "algorithm.use_kl_in_reward=True",
            f"{ROLLOUT}.n=2",
            "trainer.total_training_steps=2",
        ]

    def context(self, path: str) -> list[str]:
        """What must stand beside a key for it to act, beyond what its switch says."""
        folder, overlong = (
            self.folder,
            [f"data.train_files={self.folder / 'ragged.jsonl'}", "data.max_prompt_length=50"],
        )
        tagged = "{{ flag }}{% for m in messages %}{{ m.content }}{% endfor %}"
        return {
            "data.truncation": [*overlong, "data.truncation=left"],
            "data.filter_overlong_prompts": [*overlong, "data.truncation=left"],
            "data.apply_chat_template_kwargs": [f'data.chat_template="{tagged}"'],
            "data.custom_cls.path": ["data.custom_cls.name=First", f"data.custom_cls.path={folder / 'datasets.py'}"],
            "data.custom_cls.name": ["data.custom_cls.name=First", f"data.custom_cls.path={folder / 'datasets.py'}"],
            f"{ROLLOUT}.val_kwargs.temperature": [
                f"{ROLLOUT}.val_kwargs.do_sample=True",
                f"{ROLLOUT}.val_kwargs.temperature=1",
            ],
            f"{ROLLOUT}.val_kwargs.n": [f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.temperature=1"],
            "critic.enable": ["algorithm.adv_estimator=grpo"],
            "algorithm.gdpo_reward_keys": [
                "algorithm.use_kl_in_reward=False",
                "algorithm.gdpo_reward_keys=[score,acc]",
            ],
            "algorithm.gdpo_reward_weights": ["algorithm.use_kl_in_reward=False", "algorithm.gdpo_reward_keys=[score]"],
            "reward_model.overlong_buffer.enable": ["reward_model.overlong_buffer.len=2"],
            "reward_model.overlong_buffer.len": ["reward_model.overlong_buffer.len=2"],
            "reward_model.overlong_buffer.penalty_factor": ["reward_model.overlong_buffer.len=2"],
            "trainer.total_epochs": ["trainer.total_training_steps=null"],
            "trainer.project_name": ["~trainer.default_local_dir"],
            "trainer.experiment_name": ["~trainer.default_local_dir"],
            "trainer.resume_mode": [f"trainer.default_local_dir={folder / 'before'}"],
            "trainer.resume_from_path": [
                "trainer.resume_mode=resume_path",
                f"trainer.resume_from_path={folder / 'before' / 'global_step_1'}",
            ],
        }.get(path, [])

    def others(self, path: str) -> list[str]:
        """Values for keys whose type does not say enough to make one up."""
        folder = self.folder
        return {
            "data.train_files": [f"{folder / 'ragged.jsonl'}"],
            "data.val_files": [f"{folder / 'train.jsonl'}"],
            "data.chat_template": ['"{% for m in messages %}{{ m.content }}{% endfor %}"'],
            "data.apply_chat_template_kwargs": ["{flag: 7}"],
            "data.custom_cls.path": [f"{folder / 'datasets2.py'}"],
            "data.custom_cls.name": ["Second"],
            f"{MODEL}.path": [f"{folder / 'model2'}"],
            f"{MODEL}.tokenizer_path": [f"{folder / 'model2'}"],
            f"{MODEL}.target_modules": ["[q_proj]"],
            f"{MODEL}.override_config": ["{rms_norm_eps: 0.1}"],
            "critic.model.path": [f"{folder / 'model2'}"],
            "critic.model.override_config": ["{rms_norm_eps: 0.1}"],
            "algorithm.gdpo_reward_keys": ["[score]"],
            "algorithm.gdpo_reward_weights": ["[0.5]"],
            "custom_reward_function.path": [f"{folder / 'reward2.py'}"],
            "custom_reward_function.name": ["other_score"],
            "custom_reward_function.reward_kwargs": ["{weight: 2.0}"],
            "trainer.default_local_dir": [f"{folder / 'elsewhere'}"],
            "trainer.logger": ["console"],
            "trainer.resume_mode": ["disable"],
            "trainer.resume_from_path": [f"{folder / 'before' / 'global_step_2'}"],
        }.get(path, [])


@pytest.fixture(scope="module")
def situation(tmp_path_factory: pytest.TempPathFactory) -> Situation:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    save_tiny(folder / "model2", seed=5)
    for name in ("reward.py", "reward2.py"):
        (folder / name).write_text(REWARDS)
    for name in ("datasets.py", "datasets2.py"):
        (folder / name).write_text(DATASETS)
    ragged = rows(count=8)
    ragged[3]["prompt"][0]["content"] += " Think about it for a while."
    write_jsonl(folder / "ragged.jsonl", ragged)
    situation = Situation(folder)
    train([*situation.base, f"trainer.default_local_dir={folder / 'before'}", "trainer.save_freq=1"])
    return situation


# --- one key in one situation -------------------------------------------------------------------------------------


def candidates(key: Key, now: object, situation: Situation) -> list[str]:
    """Other legal values of a key, as they are written in an override."""
    named = situation.others(key.path)
    if named:
        return named
    if isinstance(now, bool):
        return [str(not now)]
    if key.choices:
        chosen = now if isinstance(now, tuple) else (now,)
        others = [choice for choice in key.choices if choice not in chosen]
        return [choice for choice in others if choice in allowed_choices(key)] or others
    if isinstance(now, tuple) and all(isinstance(item, float) for item in now):
        return [show([0.5 * item for item in now])]
    if isinstance(now, int) or (now is None and "whole number" in key.type_text):
        return [str((now or 0) + 1), str((now or 0) + 4)]
    if isinstance(now, float) or (now is None and "number" in key.type_text):
        return [str(0.5 * now if now else 0.5)]
    return ["{other: 1}"] if key.is_mapping else ["[7]" if "list or null" in key.type_text else "other"]


def switched_on(path: str, situation: Situation) -> list[str]:
    """Overrides that switch a key on, where a switch of its own decides."""
    switch = look_up(SWITCHED, path)
    if switch is None or not switch.is_off(values_of(load(*situation.base).config)):
        return []
    refused = look_up(REFUSED, switch.key)
    on = [value for value in switch.on or () if refused is None or value not in (refused.values or ())]
    value = show(on[0]) if on else candidates(keys()[switch.key], (switch.off or (None,))[0], situation)[0]
    return [*switched_on(switch.key, situation), f"{switch.key}={value}"]


@cache
def load(*overrides: str) -> LoadedConfig:
    return load_config(None, overrides)


@cache
def sight(observe: Callable[[LoadedConfig], object], overrides: tuple[str, ...]) -> object:
    return observe(load(*overrides))


def effect(path: str, situation: Situation, observe: Callable[[LoadedConfig], object]) -> str | None:
    """What a user sees of a key when it is changed: "changed", "error", "noted" or "refused"; None: nothing.

    Where some values are taken silently and without effect, and no value has one, it is None.
    """
    context = (*situation.base, *switched_on(path, situation), *situation.context(path))
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
        self.loaders = []
        for module, name in LOADERS:
            loader = Remembered(KeptPool if name == "RewardPool" else getattr(module, name), name != "RewardPool")
            patch.setattr(module, name, loader)
            self.loaders.append(loader)

    def build(self, loaded: LoadedConfig) -> Run:
        for loader in self.loaders:
            loader.asked.clear()
        return build_run(loaded)

    def plan(self, loaded: LoadedConfig) -> Plan:
        run = self.build(loaded)
        run.trainer.loggers.close()
        return plan_of(run, loaded) | {loader.load.__name__: str(loader.asked) for loader in self.loaders}

    def step(self, loaded: LoadedConfig) -> dict[str, float]:
        trainer = self.build(loaded).trainer
        metrics = trainer.step([trainer.dataset[row] for row in trainer.sampler.next_batch()])
        trainer.loggers.close()
        return {key: value for key, value in metrics.items() if not key.startswith(CLOCKS)}

    def close(self) -> None:
        for pool in self.loaders[-1].results.values():
            RewardPool.close(pool)


def command(loaded: LoadedConfig) -> tuple[object, ...]:
    """What `tether train` prints, measures and writes."""
    folder = Path(loaded.config.trainer.default_local_dir)
    shutil.rmtree(folder, ignore_errors=True)
    printed = StringIO()
    with redirect_stdout(printed):
        train_command(loaded, "tether train")
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return printed.getvalue(), measured(folder), files


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        bench = Bench(patch)
        yield bench
        bench.close()


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("path", live_keys())
def test_a_live_key_has_an_effect(path: str, situation: Situation, bench: Bench) -> None:
    sight = effect(path, situation, bench.plan) or effect(path, situation, bench.step)
    assert sight or effect(path, situation, command), f"{path}: a dead key: nothing that a user can see depends on it"


def test_looking_twice_shows_the_same(situation: Situation, bench: Bench) -> None:
    """Otherwise everything above would pass."""
    loaded = load(*situation.base)
    for look in (bench.plan, bench.step, command):
        assert look(loaded) == look(loaded)


@pytest.mark.parametrize("inherits", [False, True])  # apart, so that no key is changed to what it inherits
def test_every_other_key_is_refused_or_said_to_have_no_effect(inherits: bool, situation: Situation) -> None:
    base = values_of(load(*situation.base).config)
    others = [path for path in keys() if path not in live_keys() and not keys()[path].alias_of]
    rest = [path for path in others if (keys()[path].inherits is not None) == inherits]
    settings = {path: f"{path}={candidates(keys()[path], base[path], situation)[-1]}" for path in rest}
    with pytest.raises(ConfigError) as error:
        load(*situation.base, *settings.values())
    refused = {problem.path for problem in error.value.problems if refusal(problem.path, error.value)}
    taken = [path for path in rest if path not in refused]
    notes = "\n".join(load(*situation.base, *(settings[path] for path in taken)).notes)
    assert len(refused) > 10
    assert len(taken) > 10
    assert [path for path in taken if f"{path}=" not in notes] == []


def test_a_key_that_is_said_to_have_no_effect_has_none(situation: Situation, bench: Bench) -> None:
    base = values_of(load(*situation.base).config)
    quiet = [path for path in keys() if look_up(ELSEWHERE, path) and not look_up(REFUSED, path)]
    settings = [f"{path}={candidates(keys()[path], base[path], situation)[0]}" for path in quiet]
    assert len(settings) > 80
    assert bench.plan(load(*situation.base, *settings)) == bench.plan(load(*situation.base))


def test_a_key_that_nothing_reads_would_show(situation: Situation, bench: Bench, monkeypatch) -> None:
    """The negative control: batch sizes that do nothing (verl #1028), a seed or a rate that is read from elsewhere."""
    deaf = {
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": ("micro_batching", MicroBatching(max_rows=8)),
        "actor_rollout_ref.actor.optim.weight_decay": ("build_optimizer", OptimizerOptions(lr=1e-2)),
    }
    sight.cache_clear()
    for _, (builder, always) in deaf.items():
        monkeypatch.setattr(learners, builder, lambda *_, always=always, **__: always)
    assert [effect(path, situation, look) for path in deaf for look in (bench.plan, bench.step)] == [None] * 4
    sight.cache_clear()


@pytest.mark.parametrize("path", [path for path, key in keys().items() if key.alias_of])
def test_a_second_name_is_the_key_itself(path: str, situation: Situation) -> None:
    key = keys()[path].alias_of
    assert key is not None
    value = candidates(keys()[key], values_of(load(*situation.base).config)[key], situation)[0]
    named, itself = (load(*situation.base, f"~{key}", f"{name}={value}").tree() for name in (path, key))
    assert named == itself != load(*situation.base).tree()
