"""`tether.train` and `tether.load`: what the commands do, from Python."""

import io
import json
import math
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.utils.logging import is_progress_bar_enabled

import tether
from tests.runs.loops import Control, Text
from tests.runs.tiny_run import write_inputs
from tether.commands.model import generate
from tether.commands.policy import Policy, load_saved
from tether.commands.result import run_scores
from tether.config import ConfigError, Override, load_config
from tether.control.learning.rollouts import EnvRollouts
from tether.metrics.loggers.jsonl import read_metrics
from tether.runtime import objects
from tether.runtime.interrupt import graceful_interrupt
from tether.runtime.objects import register_objects
from tether.text.learning.rollouts import TextRollouts
from tether.text.sampling.build import build_generator
from tether.text.sampling.engine import NativeEngine
from tether.text.standalone import build_evaluator

ROOT = Path(__file__).resolve().parents[2]
SHORT = {"trainer.total_training_steps": 2, "trainer.test_freq": 1, "trainer.preflight": False}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@contextmanager
def process_unchanged() -> Iterator[None]:
    """What a run changes in its process is restored: handlers of signals, watching threads, progress bars."""

    def state() -> tuple[object, ...]:
        threads = [thread.name for thread in threading.enumerate()]
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        return handlers, threads.count("late-calls"), is_progress_bar_enabled()

    before = state()
    yield
    assert state() == before


@pytest.fixture(scope="module")
def text_run(inputs: Path, tmp_path_factory) -> tether.TrainingResult:
    folder = tmp_path_factory.mktemp("text") / "run"
    config = load_config(None, Text(inputs).overrides(folder)).tree()
    with process_unchanged():
        return tether.train(config, SHORT)


@pytest.fixture(scope="module")
def control_run(tmp_path_factory) -> tether.TrainingResult:
    pytest.importorskip("gymnasium")
    folder = tmp_path_factory.mktemp("control") / "run"
    with process_unchanged():
        return tether.train(
            overrides=[*Control().overrides(folder), *(f"{key}={value}" for key, value in SHORT.items())]
        )


def test_importing_tether_loads_nothing_heavy():
    code = "import sys, tether; sys.exit(bool({'torch', 'transformers', 'gymnasium', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        tether.trian  # noqa: B018


@pytest.mark.parametrize("kind", ["text", "control"])
def test_a_result_is_what_the_folder_says(kind: str, request: pytest.FixtureRequest):
    result: tether.TrainingResult = request.getfixturevalue(f"{kind}_run")
    logged = read_metrics(result.folder)
    assert result.metrics == [{"step": step, **metrics} for step, metrics in logged.items()]
    assert (result.step, result.total_steps, result.stopped_by) == (2, 2, None)
    assert result.checkpoint == result.folder / "global_step_2"
    scores = dict(zip(result.column("step"), result.column(result.score), strict=True)) if kind == "control" else None
    if scores:
        assert result.score == "eval/return"
        assert (result.best_score, result.last_score) == (max(scores.values()), scores[2])
        assert scores[result.best_step] == result.best_score
    with pytest.raises(ValueError, match="eval/retrun: not logged"):
        result.column("eval/retrun")
    assert list(result.to_pandas().index) == [1, 2]


def test_the_score_is_of_tests_where_there_were_any_else_of_training():
    """Two sources of 0.25 and 0.75 score 0.5; a NaN is no score, and the first of two equal steps is the best."""
    held_out = {"val-core/a/reward/mean@1": 0.25, "val-core/b/reward/mean@1": 0.75, "critic/score/mean": 9.0}
    assert run_scores({0: held_out, 1: {"critic/score/mean": 9.0}}) == ("val-core", {0: 0.5})
    one = {"val-core/a/reward/mean@1": 0.25}
    assert run_scores({3: one}) == ("val-core/a/reward/mean@1", {3: 0.25})
    assert run_scores({1: {"critic/score/mean": math.nan}, 2: {"critic/score/mean": 1.5}}) == (
        "critic/score/mean",
        {2: 1.5},
    )
    assert run_scores({1: {"actor/lr": 1.0}}) == ("", {})


def test_the_same_call_resumes(control_run: tether.TrainingResult):
    again = tether.train(control_run.checkpoint / "run.yaml", {"trainer": {"total_training_steps": 3}})
    assert again.folder == control_run.folder
    assert [row["step"] for row in again.metrics] == [1, 2, 3]
    assert again.metrics[:2] == control_run.metrics


def test_mistakes_are_one_error_as_on_the_command_line(inputs: Path, tmp_path: Path):
    overrides = Text(inputs).overrides(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"trainer\.total_epoch: .*total_epochs"):
        tether.train(overrides=[*overrides, "trainer.total_epoch=3"])
    with pytest.raises(ConfigError, match=r"trainer\.total_epochs: .*'x'"):
        tether.train(load_config(None, overrides).tree(), {"trainer.total_epochs": "x"})
    with pytest.raises(ConfigError, match="no such file"):
        tether.train(load_config(None, overrides).tree(), {"data.train_files": [tmp_path / "none.parquet"]})
    with pytest.raises(ValueError, match="give a mapping of keys, or a list of texts"):
        tether.train(overrides="trainer.total_epochs=2")
    with pytest.raises(ValueError, match="config is a int"):
        tether.train(3)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_values_need_no_quotes():
    """A mapping passes values unchanged that Hydra's grammar would split."""
    name = "a,b=[1]: 'c'"
    configured = [Override("trainer.experiment_name", name, delete=False), "env.train.id=CartPole-v1"]
    assert load_config(None, configured).config.trainer.experiment_name == name


def test_outside_of_the_main_thread_signals_are_left_alone():
    seen = []

    def run() -> None:
        with graceful_interrupt() as interrupted:
            seen.append(interrupted())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False]


# --- asking a language model --------------------------------------------------------------------------------------


def test_generate(text_run: tether.TrainingResult):
    policy = tether.load(text_run.folder)
    talk = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}]
    one = policy.generate("1+1?", max_new_tokens=4)
    both = policy.generate(["1+1?", talk], n=2, max_new_tokens=4, temperature=1.0, seed=7)
    assert len(one) == 1
    assert [response.prompt for response in both] == [0, 0, 1, 1]
    for response in (*one, *both):
        assert 1 <= len(response.token_ids) == len(response.log_probs) <= 4
        assert all(log_prob <= 0 for log_prob in response.log_probs)
        assert response.truncated == (len(response.token_ids) == 4) or not response.truncated
        assert "<|im_end|>" not in response.text
    assert both == policy.generate(["1+1?", talk], n=2, max_new_tokens=4, temperature=1.0, seed=7)
    assert both != policy.generate(["1+1?", talk], n=2, max_new_tokens=4, temperature=1.0, seed=8)
    assert policy.generate("1+1?", system="Add.") == policy.generate(talk)
    # A plain folder has no run that says in which number format it computes.
    plain = Policy(build_generator(text_run.checkpoint / "actor", dtype="float32"))
    assert plain.generate("1+1?", max_new_tokens=4) == one
    assert tether.load(text_run.checkpoint / "actor").generate("1+1?", max_new_tokens=4)


def test_settings_that_cannot_be_meant_are_refused_by_name(text_run: tether.TrainingResult):
    policy = tether.load(text_run.folder)
    for setting in (
        {"top_p": 0.0}, {"top_p": -0.1}, {"top_p": 1.5}, {"top_p": math.nan}, {"temperature": math.nan},
        {"temperature": math.inf}, {"top_k": -5}, {"n": 0}, {"stop": ["a", ""]},
    ):  # fmt: skip
        ((name, _),) = setting.items()
        with pytest.raises(ValueError, match=f"^{name}"):
            policy.generate("1+1?", **setting)
    with pytest.raises(ValueError, match=r"context of 512 tokens. Lower max_new_tokens \(--max-new-tokens\)"):
        policy.generate("x" * 300)


def test_a_response_ends_before_a_stop_text(text_run: tether.TrainingResult):
    policy = tether.load(text_run.folder)
    sampling = {"max_new_tokens": 8, "temperature": 1.0, "n": 8}
    every = policy.generate("1+1?", **sampling)
    index, longest = max(enumerate(every), key=lambda one: len(one[1].text))
    stop = longest.text[1:3]
    assert stop, every
    cut = policy.generate("1+1?", **sampling, stop=stop)[index]
    assert cut.text == longest.text[: longest.text.index(stop)]
    assert not cut.truncated
    assert cut.token_ids == longest.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) == len(cut.log_probs) <= len(longest.token_ids)
    assert policy.generate("1+1?", **sampling, stop=["not there"]) == every


def test_prompts_from_standard_input_and_from_files(
    text_run: tether.TrainingResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    options = {"n": 1, "max_new_tokens": 2, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "stop": (), "system": None}
    options |= {"seed": 1, "num_threads": None, "trust_remote_code": False}
    monkeypatch.setattr(sys, "stdin", io.StringIO("2+2?\nQuickly.\n"))
    (tmp_path / "prompts.txt").write_text("1+1?\n\n3+3?\n")
    generate(str(text_run.folder), ["-", f"@{tmp_path / 'prompts.txt'}", "@@home"], **options)
    output = capsys.readouterr().out
    for prompt in ("2+2?\nQuickly.", "1+1?", "3+3?", "@home"):
        assert f"--- {prompt}\n" in output
    for argument, message in (("@nowhere.txt", "nowhere.txt: the file of prompts cannot be read"), ("-", "is empty")):
        with pytest.raises(ValueError, match=message):
            generate(str(text_run.folder), [argument], **options)


ODD = {
    "configuration_odd.py": "from transformers import LlamaConfig\n\n\nclass OddConfig(LlamaConfig):\n"
    "    model_type = 'odd_llama'\n",
    "modeling_odd.py": "from transformers import LlamaForCausalLM\n\nfrom .configuration_odd import OddConfig\n\n\n"
    "class OddForCausalLM(LlamaForCausalLM):\n    config_class = OddConfig\n",
}


def test_a_run_that_trusts_its_models_code_can_be_asked(inputs: Path, tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(inputs / "model", model)
    for name, code in ODD.items():
        (model / name).write_text(code)
    classes = {"AutoConfig": "configuration_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}
    odd = {"model_type": "odd_llama", "architectures": ["OddForCausalLM"], "auto_map": classes}
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | odd))
    with pytest.raises(ValueError, match=r"trust it with actor_rollout_ref.model.trust_remote_code=True"):
        tether.load(model)
    assert tether.load(model, trust_remote_code=True).generate("1+1?", max_new_tokens=2)

    configured = SHORT | {
        "trainer.total_training_steps": 1,
        "trainer.test_freq": -1,
        "actor_rollout_ref.model.path": model,
    }
    configured |= {"actor_rollout_ref.model.trust_remote_code": True, "trainer.default_local_dir": tmp_path / "run"}
    run = tether.train(load_config(None, Text(inputs).overrides(tmp_path)).tree(), configured)
    assert tether.load(run.folder).generate("1+1?", max_new_tokens=2)
    loaded = load_config(run.checkpoint / "run.yaml", ["data.val_max_samples=2"])
    with build_evaluator(loaded, run.checkpoint / "actor") as (evaluation, _):
        assert len(evaluation.dataset) == 2


@pytest.mark.parametrize("prompt", ["", [], [""], [3], [[{"role": "user"}]], [["1+1?"]]])
def test_what_is_no_prompt_is_refused(text_run: tether.TrainingResult, prompt: object):
    with pytest.raises(ValueError, match="prompts"):
        tether.load(text_run.folder).generate(prompt)  # type: ignore[arg-type]


def number_format(policy: tether.Policy) -> torch.dtype:
    assert policy._text is not None
    return policy._text[0]._model.dtype


def test_a_checkpoint_is_rendered_as_in_training(text_run: tether.TrainingResult, inputs: Path, tmp_path: Path):
    """A template that hides the question: all prompts are one, and only where the run had this template.

    It computes in the number format in which the run sampled, whatever is the fastest one here.
    """
    hiding = "{{ '<|im_start|>' }}"
    configured = {**SHORT, "data.chat_template": hiding, "trainer.default_local_dir": tmp_path / "run"}
    configured |= {"trainer.total_training_steps": 1, "trainer.test_freq": -1}
    configured |= {"actor_rollout_ref.rollout.dtype": "bfloat16"}
    config = load_config(None, Text(inputs).overrides(tmp_path)).tree()
    policy = tether.load(tether.train(config, configured).folder)
    first, second = policy.generate(["1+1?", "a longer question"], temperature=0.0, max_new_tokens=8)
    assert first.token_ids == second.token_ids
    without = tether.load(text_run.folder)
    one, other = without.generate(["1+1?", "a longer question"], max_new_tokens=8)
    assert one.token_ids != other.token_ids
    assert (number_format(policy), number_format(without)) == (torch.bfloat16, torch.float32)


def test_load_takes_the_names_that_generate_takes(
    text_run: tether.TrainingResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path))
    assert text_run.checkpoint is not None
    shutil.copytree(text_run.checkpoint / "actor", tmp_path / "smollm2-135m")  # as if it had been pulled
    (one,) = tether.load("smollm2-135m").generate("1+1?", max_new_tokens=4)
    assert one == tether.load(text_run.checkpoint / "actor").generate("1+1?", max_new_tokens=4)[0]
    with pytest.raises(ValueError, match=r"Did you mean smollm2-135m"):
        tether.load("smolm2-135m")


def test_each_kind_names_the_method_of_the_other(
    text_run: tether.TrainingResult, control_run: tether.TrainingResult, tmp_path: Path
):
    with pytest.raises(ValueError, match=r"predict: .*generate\(prompts\)"):
        tether.load(text_run.folder).predict(np.zeros(4))
    with pytest.raises(ValueError, match=r"generate: .*predict\(observation\)"):
        tether.load(control_run.folder).generate("1+1?")
    with pytest.raises(ValueError, match="no checkpoint here"):
        tether.load(tmp_path)


# --- asking a control policy --------------------------------------------------------------------------------------


def test_predict_plays_what_the_run_tested(control_run: tether.TrainingResult):
    """Three episodes from the seeds of the test have the return that the last step of the run logged."""
    policy = tether.load(control_run.checkpoint)
    returns = []
    for seed in (10000, 10001, 10002):
        env = policy.make_env()
        obs, _ = env.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            action = policy.predict(obs)
            assert env.action_space.contains(action)
            obs, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    assert sum(returns) / 3 == pytest.approx(control_run.metrics[-1]["eval/return"])


ALSO_PLAYED = {
    "a memory, statistics and bounds": [
        "env.train.id=Pendulum-v1", "policy.lstm_dim=4", "policy.normalize_observations=True", "policy.init_logstd=2",
        "env.train.max_episode_steps=20",
    ],
    "a tuple of choices": ["env.train.id=Blackjack-v1"],
}  # fmt: skip


@pytest.mark.parametrize("more", ALSO_PLAYED.values(), ids=ALSO_PLAYED)
def test_predict_plays_what_the_run_tested_whatever_the_policy_reads(more: list[str], tmp_path: Path):
    pytest.importorskip("gymnasium")
    short = [f"{key}={value}" for key, value in SHORT.items()]
    run = tether.train(overrides=[*Control().overrides(tmp_path), *short, *more, "env.eval.num_episodes=4"])
    policy = tether.load(run.checkpoint)
    returns = []
    for seed in range(10000, 10000 + 4):
        env = policy.make_env()
        obs, _ = env.reset(seed=seed)
        total, ended, begins = 0.0, False, True
        while not ended:
            action = policy.predict(obs, begins=begins)
            assert env.action_space.contains(action)
            obs, reward, terminated, truncated, _ = env.step(action)
            total, ended, begins = total + float(reward), terminated or truncated, False
        returns.append(total)
    assert sum(returns) / 4 == pytest.approx(run.metrics[-1]["eval/return"], rel=1e-4)


def test_predict_takes_batches_and_draws(control_run: tether.TrainingResult):
    policy, again = (tether.load(control_run.folder, seed=3) for _ in range(2))
    batch = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    likeliest = policy.predict(batch)
    assert likeliest.tolist() == [policy.predict(row) for row in batch]
    drawn = policy.predict(batch, deterministic=False)
    assert drawn.tolist() == again.predict(batch, deterministic=False).tolist()
    assert drawn.tolist() != likeliest.tolist()


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (np.zeros(3), r"shape \(3,\); give \(4,\)"),
        ([0, 0, 0, math.nan], "entry 3 of state in row 0 is nan"),
        ("x", r"\(4,\)"),
    ],
)
def test_observations_that_do_not_fit_are_refused(control_run: tether.TrainingResult, observation, message: str):
    with pytest.raises(ValueError, match=message):
        tether.load(control_run.folder).predict(observation)


@pytest.mark.parametrize("kind", ["text", "control"])
def test_a_lack_of_memory_while_sampling_is_one_error(
    kind: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As on the command line; what was trained until then is saved."""
    steps: list[int] = []

    def allocate(self: object, tasks: object, step: int, *more: object) -> object:
        steps.append(step)
        return torch.empty(2**60) if step == 2 else original(self, tasks, step, *more)

    loop = Text(inputs) if kind == "text" else Control()
    rollouts = TextRollouts if kind == "text" else EnvRollouts
    original = rollouts.collect
    monkeypatch.setattr(rollouts, "collect", allocate)
    with pytest.raises(ValueError, match=r"^out of memory in .*line \d+ \(.*allocate.*\)\. .*rollout\.max_num_seqs"):
        tether.train(overrides=loop.overrides(tmp_path, "trainer.save_freq=-1"))
    assert steps == [1, 2]
    assert (tmp_path / "global_step_1").is_dir()


def test_a_lack_of_memory_while_answering_is_one_error(
    text_run: tether.TrainingResult, monkeypatch: pytest.MonkeyPatch
):
    policy = tether.load(text_run.folder)
    monkeypatch.setattr(NativeEngine, "generate", lambda *arguments: torch.empty(2**60))
    with pytest.raises(ValueError, match=r"^out of memory in "):
        policy.generate("2+2?")


def test_a_second_run_in_the_process_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Objects, global generators, signals and thread counts are the process's: in a thread, and out of a callback."""
    gymnasium = pytest.importorskip("gymnasium")
    monkeypatch.setattr(objects, "WAIT_SECONDS", 0.01)
    messages: list[str] = []

    def attempt(call: Callable[[], object]) -> None:
        try:
            call()
        except ValueError as error:
            messages.append(str(error))

    def train_another() -> object:
        overrides = Control().overrides(tmp_path / "other", "env.train.vectorization=sync")
        return tether.train(overrides=overrides, env=lambda: gymnasium.make("Acrobot-v1"))

    def hold_another() -> None:
        with register_objects({"env": object()}):
            pass

    class Starts:
        def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
            attempt(train_another)
            for call in (train_another, hold_another):
                thread = threading.Thread(target=attempt, args=(call,))
                thread.start()
                thread.join()
            hold_another()

    overrides = Control().overrides(tmp_path / "run", "env.train.vectorization=sync", "trainer.total_training_steps=1")
    tether.train(overrides=overrides, env=lambda: gymnasium.make("CartPole-v1"), callbacks=[Starts()])
    assert [text.split(",")[0] for text in messages] == [
        "a run is training in this process already",
        "a run is training in this process already",
        "env= another thread of this process trains with objects of its own",
    ]
    assert not (tmp_path / "other").exists()
    hold_another()


def test_files_of_a_run_are_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A relative path belongs to the folder in which the run was started; what is there in this one comes first."""
    start, elsewhere = tmp_path / "start", tmp_path / "elsewhere"
    checkpoint = start / "checkpoints/tether/mine/global_step_2"
    for folder in (checkpoint, elsewhere):
        folder.mkdir(parents=True)
    for name in ("train.jsonl", "val.jsonl", "mine.py"):
        (start / name).touch()
    (elsewhere / "train.jsonl").touch()
    configured = [
        "actor_rollout_ref.model.path=m",
        "data.train_files=train.jsonl",
        "data.val_files=['val.jsonl?question=q&answer=a',gone.jsonl]",
        "custom_reward_function.path=mine.py",
        "trainer.experiment_name=mine",
    ]
    (checkpoint / "run.yaml").write_text(load_config(None, configured).to_yaml())
    monkeypatch.chdir(elsewhere)
    loaded = load_saved(checkpoint, ["data.max_prompt_length=7"])
    assert loaded.config.data.val_files == (f"{start}/val.jsonl?question=q&answer=a", "gone.jsonl")
    assert loaded.config.data.train_files == ("train.jsonl",)
    assert loaded.config.custom_reward_function.path == f"{start}/mine.py"
    assert loaded.config.data.max_prompt_length == 7
    assert load_saved(checkpoint, ["data.val_files=val.jsonl"]).config.data.val_files == ("val.jsonl",)
    monkeypatch.chdir(start)
    assert load_saved(checkpoint, []).config == load_config(checkpoint / "run.yaml", []).config
