"""Runs under faults: gradients that are not finite, folders that are taken, another run's checkpoints."""

import importlib.util
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from tests.control.envs import toys
from tests.runs.golden import Golden
from tests.runs.resume import assert_same_end
from tests.runs.tiny_run import GAE, GRPO, LIGHT, measured, same, train
from tether.checkpoints.store import step_of, verify
from tether.config import load_config
from tether.control.build import build_control_run
from tether.loop.incident import replay
from tether.metrics.loggers import Loggers
from tether.metrics.loggers.jsonl import read_samples
from tether.metrics.loggers.protocol import LogFailed, Sample
from tether.runtime import interrupt
from tether.runtime.objects import register_objects
from tether.runtime.run_lock import RunFolderBusy
from tether.text.build import build_run
from tether.text.rewards.outcome import RewardFailure

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
SLOW = pytest.mark.slow
UNSCALED = "algorithm.norm_adv_by_std_in_grpo=False"
NO_PEFT = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="LoRA needs peft")
OVERFLOWS = {
    "learning rate": [*GAE, f"{ACTOR}.optim.lr=1e30", f"{ACTOR}.optim.lr_scheduler_type=constant"],
    "reward": [*GAE, "critic.optim.lr_warmup_steps=0"],
    "bfloat16": [*GRPO, UNSCALED, f"{ACTOR}.fsdp_config.dtype=bfloat16", "actor_rollout_ref.rollout.dtype=bfloat16"],
    "full KL": [*GRPO, UNSCALED, f"{ACTOR}.kl_loss_type=full"],
    "adapters": [*GAE, f"{MODEL}.lora_rank=4", "critic.model.lora_rank=4"],
}


MARKS = dict.fromkeys(OVERFLOWS, SLOW) | {"adapters": NO_PEFT}


def too_large(solution_str: str, **row: object) -> float:
    """Rewards whose sums are beyond float32."""
    return 1e38 * (len(solution_str) % 3)


@pytest.mark.parametrize("cause", [pytest.param(name, marks=MARKS.get(name, ())) for name in OVERFLOWS])
def test_an_overflow_ends_no_run_and_replays(cause: str, base: list[str]) -> None:
    """With gradient checkpointing, as by default."""
    reward = "letters" if cause == "learning rate" else "too_large"
    settings = [f"custom_reward_function.path=object:{reward}", "trainer.total_training_steps=2"]
    with register_objects({"too_large": too_large}):
        folder = train([*base, *OVERFLOWS[cause], *settings])
    metrics = measured(folder)
    assert list(metrics) == [1, 2]
    skipped = [
        (role, step)
        for step in metrics
        for role in ("actor", "critic")
        if metrics[step].get(f"{role}/skipped_updates", 0) > 0
    ]
    assert skipped
    for role, step in skipped:
        assert replay(folder / "incidents" / role / f"step_{step}"), (role, step)
    assert not list(folder.rglob(".writing_*"))


CONTROL = [
    "env.train.id=CartPole-v1",
    "env.train.total_num_envs=2",
    "env.train.max_steps_per_rollout_epoch=8",
    f"{ACTOR}.ppo_mini_batch_size=16",
    "trainer.logger=file",
    "trainer.total_training_steps=3",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "trainer.log_freq=1",
]
Start = Callable[[list[str]], Any]


@pytest.fixture(params=["text", "control"])
def kind(request: pytest.FixtureRequest, base: list[str], tmp_path: Path) -> tuple[Start, list[str]]:
    """The builder of a run of this kind, and its settings; its folder is tmp_path/run."""
    if request.param == "text":
        small = [*base, *GRPO, *LIGHT, "actor_rollout_ref.rollout.n=2", f"{ACTOR}.ppo_epochs=1"]
        return lambda more: build_run(load_config(None, [*small, *more])), [f"{MODEL}.path=/nowhere"]
    settings = [*CONTROL, f"trainer.default_local_dir={tmp_path / 'run'}"]
    return lambda more: build_control_run(load_config(None, [*settings, *more])), ["env.train.id=Nothing-v0"]


def finish(run: Any) -> None:
    try:
        run.trainer.fit()
    finally:
        run.close()


class TooLarge(gymnasium.RewardWrapper):
    """Gives rewards whose sums are beyond float32, from the ninth step on."""

    count = 0

    def reward(self, reward: Any) -> float:
        self.count += 1
        return 1e38 if self.count > 8 else float(reward)


CONTROL_OVERFLOWS = {
    "learning rate": [f"{ACTOR}.optim.lr=1e30"],
    "a CNN with a memory": [
        "env.train.id=tether/Spot-v0", "policy.model_type=cnn_policy", "policy.hidden_dim=8", "policy.lstm_dim=4",
        f"{ACTOR}.ppo_epochs=1",
    ],
}  # fmt: skip


@pytest.mark.parametrize("cause", CONTROL_OVERFLOWS)
def test_an_overflow_in_control_ends_no_run_and_replays(cause: str, tmp_path: Path) -> None:
    toys.register()
    overrides = [*CONTROL, f"trainer.default_local_dir={tmp_path / 'run'}", *CONTROL_OVERFLOWS[cause]]
    if cause != "learning rate":
        overrides += ["env.train.vectorization=sync", "env.train.wrappers=[tests.runs.test_faults:TooLarge]"]
    finish(build_control_run(load_config(None, overrides)))
    metrics = measured(tmp_path / "run")
    assert list(metrics) == [1, 2, 3]
    skipped = [step for step in metrics if metrics[step]["actor/skipped_updates"] > 0]
    assert skipped
    for step in skipped:
        assert replay(tmp_path / "run" / "incidents" / "actor" / f"step_{step}"), step
    assert not list((tmp_path / "run").rglob(".writing_*"))


def test_two_runs_in_one_folder(kind: tuple[Start, list[str]], tmp_path: Path) -> None:
    """Refused before anything is loaded: what cannot be loaded is not even missed."""
    start, unusable = kind
    run = start([])
    with pytest.raises(RunFolderBusy, match=f"^trainer.default_local_dir={tmp_path}/run: .* process {os.getpid()} on "):
        start(unusable)
    run.close()
    with pytest.raises(ValueError, match=r"nowhere|^env\.train\.id"):
        start(unusable)
    start([]).close()  # a start that failed leaves no lock


def test_a_folder_that_is_a_file_is_found_first(kind: tuple[Start, list[str]], tmp_path: Path) -> None:
    start, unusable = kind
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match=f"^trainer.default_local_dir={tmp_path}/run: {tmp_path}/run is a file"):
        start(unusable)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("control", "disable"), ("control", "resume_path"),
        pytest.param("text", "disable", marks=SLOW), pytest.param("text", "resume_path", marks=SLOW),
    ],
    indirect=["kind"],
)  # fmt: skip
def test_the_checkpoints_of_an_earlier_run_stay(
    how: str, kind: tuple[Start, list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start, _ = kind
    folder = tmp_path / "run"
    finish(start(["trainer.save_freq=1"]))
    path = f"trainer.resume_from_path={folder / 'global_step_1'}"
    mode = [f"trainer.resume_mode={how}", *([path] if how == "resume_path" else [])]
    finish(start([*mode, "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1"]))
    assert f"the checkpoints of an earlier run in {folder} are in {folder / 'earlier_1'} now" in caplog.text
    earlier = sorted((folder / "earlier_1").iterdir())
    assert [step_of(path) for path in earlier] == ([1, 2, 3] if how == "disable" else [2, 3])
    for checkpoint in earlier:
        verify(checkpoint)
    assert [path.name for path in folder.glob("global_step_*")] == ["global_step_3"]
    finish(start(["trainer.save_freq=1"]))  # goes on from there


class FailingLogger:
    """Fails at the log of one step, as one whose server or disk is gone."""

    def __init__(self, step: int) -> None:
        self.step = step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.step:
            raise LogFailed(28, "the tracker cannot be reached")

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        pass

    def close(self) -> None:
        pass


def fit_and_fail(run: Any, failure: type[Exception], message: str) -> None:
    try:
        with pytest.raises(failure, match=message):
            run.trainer.fit()
    finally:
        run.close()


def test_a_failing_reward_costs_no_step(base: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a training prompt in the second step, then of a validation prompt after it, and no checkpoint was due."""
    broken: set[str] = set()

    def flaky(data_source: str, solution_str: str, **row: object) -> float:
        if data_source in broken:
            raise OSError("the judge is not there")
        return sum(c.isalpha() for c in solution_str) / 8

    settings = [
        *base, *GAE, *LIGHT, "custom_reward_function.path=object:flaky", "trainer.total_training_steps=3",
        "trainer.save_freq=3", "trainer.test_freq=1", "actor_rollout_ref.rollout.n=1",
    ]  # fmt: skip
    folder = tmp_path / "run"
    with register_objects({"flaky": flaky}):
        whole = train([*settings, f"trainer.default_local_dir={tmp_path / 'whole'}"])
        for source, saved in (("tiny/sums", 1), ("tiny/other", 2)):
            run = build_run(load_config(None, settings))

            def step(
                prompts: Any, run: Any = run, original: Any = run.trainer.step, source: str = source
            ) -> dict[str, float]:
                if run.trainer.step_number == 1:
                    broken.add(source)
                return original(prompts)

            run.trainer.step = step
            fit_and_fail(run, RewardFailure, "the judge is not there")
            assert f"stopping (RewardFailure); {folder / f'global_step_{saved}'} is saved" in caplog.text
            broken.clear()
        train(settings)
    assert same(measured(whole), measured(folder))
    assert read_samples(whole) == read_samples(folder)
    assert_same_end(whole / "global_step_3", folder / "global_step_3")


@pytest.mark.parametrize("kind", [pytest.param("text", marks=SLOW), "control"], indirect=True)
def test_a_failing_log_costs_no_step_and_no_metrics(
    kind: tuple[Start, list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start, _ = kind
    short = ["trainer.save_freq=2", "trainer.total_training_steps=2"]
    finish(start([f"trainer.default_local_dir={tmp_path / 'whole'}", *short]))
    run = start(short)
    run.trainer.loggers = Loggers({"first": FailingLogger(1), **run.trainer.loggers._loggers})
    fit_and_fail(run, LogFailed, "cannot be reached")
    assert f"stopping (LogFailed); {tmp_path / 'run' / 'global_step_1'} is saved" in caplog.text
    assert list(measured(tmp_path / "run")) == []
    finish(start(short))
    assert same(measured(tmp_path / "whole"), measured(tmp_path / "run"))


def test_nothing_is_saved_of_a_step_that_failed_while_weights_changed(
    kind: tuple[Start, list[str]], tmp_path: Path
) -> None:
    start, _ = kind
    run = start(["trainer.save_freq=1"])
    learner = run.trainer.actor
    original, calls = learner.update, []

    def update(*arguments: Any, **options: Any) -> Any:
        calls.append(original(*arguments, **options))
        if len(calls) == 2:
            raise MemoryError("half of the weights")
        return calls[-1]

    object.__setattr__(learner, "update", update)
    fit_and_fail(run, MemoryError, "half of the weights")
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == ["global_step_1"]


class FlakyEnv(gymnasium.Wrapper):
    """Fails in a step while a file exists."""

    def __init__(self, env: gymnasium.Env, flag: str) -> None:
        super().__init__(env)
        self.flag = Path(flag)

    def step(self, action: Any) -> Any:
        if self.flag.exists():
            raise OSError("the simulator is gone")
        return super().step(action)


def test_a_failing_environment_costs_no_step(base: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flag = tmp_path / "flag"
    name = "tests/Flaky-v0"
    gymnasium.register(name, lambda flag: FlakyEnv(gymnasium.make("CartPole-v1"), flag))
    settings = [
        *CONTROL,
        f"env.train.id={name}",
        f"env.train.init_params={{flag: {flag}}}",
        "env.train.vectorization=sync",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "trainer.save_freq=3",
    ]
    run = build_control_run(load_config(None, settings))
    original = run.trainer.step

    def step(tasks: Any) -> dict[str, float]:
        if run.trainer.step_number == 2:
            flag.write_text("")
        return original(tasks)

    run.trainer.step = step
    fit_and_fail(run, Exception, "the simulator is gone")
    assert f"{tmp_path / 'run' / 'global_step_2'} is saved" in caplog.text
    flag.unlink()
    resumed = build_control_run(load_config(None, settings))
    assert resumed.trainer.step_number == 2
    finish(resumed)
    assert list(measured(tmp_path / "run")) == [1, 2, 3]


class Stuck(gymnasium.Wrapper):
    """Hangs in a step while a file exists."""

    def __init__(self, env: gymnasium.Env, flag: str) -> None:
        super().__init__(env)
        self.flag = Path(flag)

    def step(self, action: Any) -> Any:
        while self.flag.exists():
            time.sleep(0.01)
        return super().step(action)


@pytest.mark.parametrize(
    ("vectorization", "moment"),
    [
        ("sync", "a step"), ("subprocess", "a validation"),
        pytest.param("sync", "a validation", marks=SLOW), pytest.param("subprocess", "a step", marks=SLOW),
    ],
)  # fmt: skip
def test_a_signal_while_an_environment_hangs_costs_no_step(
    vectorization: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt, "GRACE_SECONDS", 0.2)
    flag, name = tmp_path / "flag", "tests/Stuck-v0"
    if name not in gymnasium.registry:
        gymnasium.register(name, lambda flag: Stuck(gymnasium.make("CartPole-v1"), flag))
    settings = [
        *CONTROL, f"env.train.id={name}", f"env.train.init_params={{flag: {flag}}}",
        f"env.train.vectorization={vectorization}", f"trainer.default_local_dir={tmp_path / 'run'}",
        *(["env.train.num_workers=1", "env.eval.total_num_envs=1"] if vectorization == "subprocess" else []),
        "trainer.save_freq=3", "trainer.test_freq=2", "trainer.val_before_train=False", "env.eval.num_episodes=2",
    ]  # fmt: skip
    run = build_control_run(load_config(None, settings))
    method = "step" if moment == "a step" else "evaluate"
    original = getattr(run.trainer, method)

    def hang(*tasks: Any) -> dict[str, float]:
        if run.trainer.step_number == 2:
            flag.write_text("")
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return original(*tasks)

    setattr(run.trainer, method, hang)
    with interrupt.graceful_interrupt() as interrupted:
        finish_or_stop(run, interrupted)
    flag.unlink()
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == ["global_step_2"]
    finish(build_control_run(load_config(None, settings)))
    metrics = measured(tmp_path / "run")
    assert list(metrics) == [1, 2, 3]
    assert "eval/return" in metrics[2]


def test_a_stop_in_the_last_step_costs_no_test(tmp_path: Path) -> None:
    def run(name: str) -> Any:
        tests = ["trainer.test_freq=3", "env.eval.num_episodes=2", f"trainer.default_local_dir={tmp_path / name}"]
        return build_control_run(load_config(None, [*CONTROL, *tests]))

    stopped = run("stopped")
    finish_or_stop(stopped, lambda: stopped.trainer.step_number == 3)
    assert "eval/return" not in measured(tmp_path / "stopped")[3]
    finish(run("stopped"))
    finish(run("whole"))
    tested, expected = (measured(tmp_path / name)[3]["eval/return"] for name in ("stopped", "whole"))
    assert tested == expected


def finish_or_stop(run: Any, interrupted: Callable[[], bool]) -> None:
    try:
        run.trainer.fit(interrupted)
    finally:
        run.close()


@pytest.mark.parametrize(
    ("frequency", "before"),
    [("-1", True), ("3", False), pytest.param("-1", False, marks=SLOW), pytest.param("3", True, marks=SLOW)],
)
def test_control_is_tested_before_training_if_it_is_asked_for(frequency: str, *, before: bool, tmp_path: Path) -> None:
    settings = [
        *CONTROL, f"trainer.default_local_dir={tmp_path / 'run'}", "env.eval.num_episodes=2", "trainer.save_freq=1",
        f"trainer.test_freq={frequency}", f"trainer.val_before_train={before}",
    ]  # fmt: skip
    run = build_control_run(load_config(None, settings))
    run.trainer.fit(lambda: run.trainer.step_number == 1)
    run.close()
    finish(build_control_run(load_config(None, settings)))
    tested = [step for step, metrics in measured(tmp_path / "run").items() if "eval/return" in metrics]
    assert tested == [0] * before + [3] * (frequency == "3")


def test_rollouts_that_cannot_be_written_are_one_clear_error(base: list[str], tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("")
    with pytest.raises(LogFailed, match=r"rollouts/1\.jsonl: cannot be written \(File exists\)"):
        train([*base, *GRPO, *LIGHT, f"trainer.rollout_data_dir={tmp_path / 'rollouts'}"])


@pytest.mark.parametrize("loop", ["text"], indirect=True)
def test_a_configuration_with_secrets_is_for_its_owner_alone(base: list[str], golden: Golden) -> None:
    """That of the golden run has none, and may be read by all."""
    settings = [*base, *GRPO, *LIGHT, "trainer.total_training_steps=1", "trainer.save_freq=1"]
    judged = ["custom_reward_function.path=object:judged", "custom_reward_function.reward_kwargs.api_key=sk-123"]
    with register_objects({"judged": lambda api_key, **row: 0.5}):
        folder = train([*settings, *judged])
    file = folder / "global_step_1" / "run.yaml"
    assert "sk-123" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    others = [path for path in folder.rglob("*") if path.is_file() and path != file]
    assert not [path for path in others if b"sk-123" in path.read_bytes()]
    assert stat.S_IMODE((golden.folder / "global_step_2" / "run.yaml").stat().st_mode) & 0o044
