"""How many threads tether computes with: an explicit number, OMP_NUM_THREADS, or the cores that are there for it."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

import tether
from tests.tiny import save_tiny
from tether.checkpoints.manifest import write_manifest
from tether.commands import cli
from tether.config import load_config
from tether.control.build import env_options, observation_fields
from tether.runtime import threads
from tether.runtime.threads import SPINS, num_threads, usable_cores
from tether.text.rewards.custom import CustomReward
from tether.text.rewards.outcome import RewardRequest, Score
from tether.text.rewards.service.pool import RewardPool

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
needs_affinity = pytest.mark.skipif(not CORES, reason="only Linux has affinity masks")
CARTPOLE = {
    "env.train.id": "CartPole-v1",
    "trainer.total_training_steps": 1,
    "trainer.test_freq": -1,
    "trainer.save_freq": 1,
    "trainer.preflight": False,
    "trainer.logger": [],
    "trainer.num_threads": None,
}


@pytest.fixture
def one_core() -> Iterator[None]:
    os.sched_setaffinity(0, CORES[:1])
    yield
    os.sched_setaffinity(0, CORES)


class Threads:
    """A callback that notes the number of threads in each step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self.seen.append(torch.get_num_threads())


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """The folder of a control run that was trained under OMP_NUM_THREADS=1, and the threads of its steps."""
    pytest.importorskip("gymnasium")
    folder, told = tmp_path_factory.mktemp("threads") / "run", Threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        tether.train(None, CARTPOLE | {"trainer.default_local_dir": folder}, callbacks=[told])
    return folder, told.seen


@pytest.fixture(scope="module")
def imported() -> None:
    """Import what the commands import, which takes longer than the commands that are tested here."""
    importlib.import_module("tether.commands.evaluate")
    importlib.import_module("tether.commands.model")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("threads") / "model")


@pytest.mark.parametrize(("variable", "expected"), [("3", 3), (" 3 ", 3), ("4,2", 4), ("", None), (None, None)])
def test_the_variable_counts_where_nothing_is_configured(
    variable: str | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert num_threads() == (expected or usable_cores())
    assert num_threads(7) == 7


@pytest.mark.parametrize("variable", ["0", "-1", "two", "1.5", ",2", "100000"])
def test_a_variable_that_is_no_number_is_named(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    with pytest.raises(ValueError, match=f"OMP_NUM_THREADS={variable}: not a number of threads"):
        num_threads()


def test_more_threads_than_can_be_started_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_threads: 100000 is not a whole number from 1 to 4096"):
        load_config(None, ["env.train.id=CartPole-v1", "trainer.num_threads=100000"])
    with pytest.raises(ValueError, match=r"100000 CPU threads are too many: give at most 4096"):
        num_threads(100_000)


@needs_affinity
def test_an_affinity_mask_counts(one_core: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert (usable_cores(), num_threads()) == (1, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert num_threads() == 2


@needs_affinity
@pytest.mark.parametrize(
    ("contents", "expected"),
    [(["50000 100000\n"], 1), (["max 100000\n"], None), (["100000\n", "100000\n"], 1), (["-1\n", "100000\n"], None)],
)
def test_a_quota_of_a_container_counts(
    contents: list[str], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tuple(str(tmp_path / f"file{i}") for i in range(len(contents)))
    for file, content in zip(files, contents, strict=True):
        Path(file).write_text(content)
    monkeypatch.setattr(threads, "CPU_QUOTAS", ((str(tmp_path / "missing"),), files))
    assert usable_cores() == (expected or len(CORES))


def test_training_uses_as_many(control: tuple[Path, list[int]]) -> None:
    assert control[1] == [1]


def test_a_loaded_policy_uses_as_many(
    control: tuple[Path, list[int]], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for folder in (control[0], model):
        torch.set_num_threads(2)
        tether.load(folder)
        assert torch.get_num_threads() == 1, folder
        tether.load(folder, num_threads=3)
        assert torch.get_num_threads() == 3, folder
        with pytest.raises(ValueError, match="num_threads=0: give 1 or more"):
            tether.load(folder, num_threads=0)


def test_the_number_of_a_run_goes_before_the_variable(
    control: tuple[Path, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    told = Threads()
    run = tether.train(
        None, CARTPOLE | {"trainer.default_local_dir": tmp_path / "run", "trainer.num_threads": 3}, callbacks=[told]
    )
    assert told.seen == [3]
    torch.set_num_threads(2)
    tether.load(run.folder)
    assert torch.get_num_threads() == 3


def test_the_number_of_a_text_run_goes_before_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    checkpoint = tmp_path / "global_step_1"
    save_tiny(checkpoint / "actor")
    (checkpoint / "run.yaml").write_text(
        f"data: {{train_files: unused}}\nactor_rollout_ref: {{model: {{path: {checkpoint / 'actor'}}}}}\n"
        "trainer: {num_threads: 3, total_training_steps: 1}\n"
    )
    write_manifest(checkpoint, 1)
    torch.set_num_threads(2)
    tether.load(tmp_path)
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("number", ["1", "3"])
def test_commands_take_a_number(
    number: str, imported: None, control: tuple[Path, list[int]], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    short = ["env.eval.num_episodes=1", "env.eval.max_episode_steps=5", "env.eval.total_num_envs=1"]
    for command in (
        ["generate", str(model), "1+1?", "--max-new-tokens", "1", "--threads", number],
        ["eval", str(control[0]), *short, "--threads", number],
    ):
        torch.set_num_threads(2)
        monkeypatch.setattr(sys, "argv", ["tether", *command])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert (end.value.code or 0, torch.get_num_threads()) == (0, int(number)), command


def test_reward_workers_divide_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward.py").write_text(
        "import os\n\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(os.environ['OMP_NUM_THREADS'])\n"
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    with RewardPool(CustomReward(str(tmp_path / "reward.py"), "compute_score", {}), num_workers=2, timeout=60) as pool:
        assert pool.score([RewardRequest("tiny", "1", "1")]) == [Score(3.0)]


@needs_affinity
def test_a_policy_that_is_loaded_on_one_core_has_one_thread(
    one_core: None, control: tuple[Path, list[int]], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for folder in (control[0], model):
        torch.set_num_threads(2)
        tether.load(folder)
        assert torch.get_num_threads() == 1, folder


@pytest.mark.parametrize("env_type", ["envpool", "gymnasium"])
def test_envpool_has_as_many_and_processes_follow_the_cores(env_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    config = load_config(None, ["env.train.id=CartPole-v1", f"env.train.env_type={env_type}"]).config
    options = env_options(config.env.train, "env.train", {}, observation_fields(config.env.train))
    assert options.num_workers == (5 if env_type == "envpool" else usable_cores())


@pytest.mark.parametrize(
    ("given", "expected"), [({}, str(SPINS)), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_that_wait_sleep_soon(given: dict[str, str], expected: str | None) -> None:
    """Where the environment does not say how they wait."""
    others = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    code = "import os, tether; print(os.environ.get('GOMP_SPINCOUNT'))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=others | given, capture_output=True, text=True, check=True)
    assert done.stdout == f"{expected}\n"


@pytest.mark.slow
@needs_affinity
def test_openmp_reads_how_they_wait_when_torch_is_loaded() -> None:
    others = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    command = [sys.executable, "-c", "import tether, torch"]
    shown = subprocess.run(
        command, env=others | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True, check=True
    ).stderr
    if "GOMP_SPINCOUNT" not in shown:
        pytest.skip("PyTorch's threads are not GNU OpenMP's")
    assert f"GOMP_SPINCOUNT = '{SPINS}'" in shown


@needs_affinity
def test_a_process_that_starts_on_one_core_has_one_thread() -> None:
    code = "from tether.runtime.machine import set_threads, torch; set_threads(None); print(torch.get_num_threads())"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = ["taskset", "-c", str(CORES[0]), sys.executable, "-c", code]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "1\n"
