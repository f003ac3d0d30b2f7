"""The `tether` command: what it prints, its exit codes, and that user errors never end in a traceback."""

import errno
import gc
import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tether
from tests.runs.tiny_run import GAE, GRPO, base_overrides, held_out, write_inputs, write_jsonl
from tether.checkpoints.manifest import MANIFEST
from tether.checkpoints.store import TRACKER
from tether.commands.cli import _importing, app, main
from tether.config import load_config
from tether.metrics.loggers.jsonl import read_metrics
from tether.runtime.run_lock import RunLock
from tether.text.input_checks import FIRST_ROWS

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("train", "eval", "generate", "plot", "doctor", "config", "critic", "model", "reward", "rm")


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


Cli = Callable[..., Said]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command in this process."""

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["tether", *arguments])
        monkeypatch.delenv("TETHER_HUGE_PAGES", raising=False)  # with it `train` re-executes the process
        monkeypatch.setenv("COLUMNS", "120")
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return Said(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def run_arguments(inputs: Path, tmp_path_factory) -> tuple[list[str], Path]:
    """Arguments of a run, and its folder, which the first test to run it fills."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    extra = [held_out(inputs), "trainer.save_freq=2", "trainer.test_freq=2", "trainer.val_before_train=True"]
    return ["train", *base_overrides(inputs, folder), *GAE, *extra, "trainer.logger=[console,file]"], folder


@pytest.fixture
def finished(cli: Cli, run_arguments: tuple[list[str], Path]) -> Path:
    arguments, folder = run_arguments
    if not folder.exists():
        assert cli(*arguments).code == 0
    return folder


def refused(said: Said) -> str:
    """The message of a refusal: exit code 2, said once, no traceback."""
    assert said.code == 2, said
    assert "Traceback" not in said.out + said.err
    assert said.err.strip()
    return said.err


# --- what every command says --------------------------------------------------------------------------------------


def test_help(cli: Cli):
    said = cli("--help")
    assert said.code == 0
    assert all(command in said.out for command in COMMANDS)
    assert "KEY=VALUE" in cli("train", "--help").out
    narrow = CliRunner().invoke(app, ["rm", "train", "--help"], env={"COLUMNS": "80"}).output
    names = ("--micro-batch-size", "--gradient-checkpointing / --no-gradient-checkpointing")
    assert all(name in narrow for name in names), narrow  # none is cut


def test_version(cli: Cli):
    said = cli("--version")
    assert (said.code, said.out) == (0, f"tether {tether.__version__}\n")


def test_what_asks_for_no_run_loads_no_torch(inputs: Path, tmp_path: Path):
    """To check a configuration reads its rows, too."""
    check = ["config", "check", *base_overrides(inputs, tmp_path), *GRPO]
    code = f"""
import sys
from tether.commands.cli import main
for arguments in {[["--version"], ["--help"], ["model", "list"], ["data", "list"], check]!r}:
    sys.argv = ["tether", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, arguments
    assert not {{"torch", "transformers"}} & set(sys.modules), arguments
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_status_without_a_folder_lists_the_runs_below_checkpoints(cli: Cli, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = cli("status")
    assert (said.code, said.err) == (
        2,
        "checkpoints: no run below it; name the folder of a run (trainer.default_local_dir)\n",
    )
    texts = {"oldest": '{"step": 3, "a": 1.0}\n', "started": "", "broken": "x\n", "newest": '{"step": 4}\n'}
    for age, name in zip((7000, 300, 200, 5), texts, strict=True):
        file = tmp_path / "checkpoints/tether" / name / "metrics.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text(texts[name])
        os.utime(file, (time.time() - age,) * 2)
    said = cli("status")
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert lines[0] == "checkpoints/tether/oldest: not running; step 3, logged 1:56:40 ago"
    assert lines[1] == "checkpoints/tether/started: not running; no step logged yet"
    assert lines[2].startswith("checkpoints/tether/broken/metrics.jsonl:1: ")
    assert lines[3].startswith("checkpoints/tether/newest: not running; step 4, logged ")


def test_a_name_that_is_too_long_is_one_sentence(cli: Cli, tmp_path: Path):
    name = "x" * 300
    said = cli("config", "check", "actor_rollout_ref.model.path=m", f"data.train_files={name}.jsonl")
    assert (said.code, said.err.count("Traceback")) == (2, 0)
    assert f"{name}.jsonl: File name too long" in said.err
    with pytest.raises(ValueError, match=r"cannot be written to \(File name too long\)"):
        RunLock(tmp_path / name)


def test_unknown_command(cli: Cli):
    assert "trian" in refused(cli("trian"))


def test_a_bad_value_of_an_option_is_one_line_that_names_the_value(cli: Cli):
    for option in (["--rows", "0"], ["--nodes=x"], ["--reward-seconds=-1"]):
        said = refused(cli("plan", "run.yaml", *option))
        assert said.count("\n") == 1
        assert said.startswith(f"{' '.join(option).replace('=', ' ')}: ")


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--trainer.total_training_steps=3", "trainer.total_training_steps"),
        ("--learning-rate", "actor_rollout_ref.actor.optim.lr"),
    ],
)
def test_a_key_written_as_an_option(cli: Cli, option: str, key: str):
    assert refused(cli("train", option)).endswith(f"Keys are written without dashes: {key}=...\n")
    assert "without dashes" not in refused(cli("train", "--colour"))


def test_config_check_names_every_problem_at_once(cli: Cli, inputs: Path, tmp_path: Path):
    sound = ["config", "check", *base_overrides(inputs, tmp_path), *GAE]
    assert cli(*sound).out.endswith("the configuration is sound\n")
    message = refused(cli(*sound, "algorithm.gemma=0.9", "algorithm.adv_estimator=gea"))
    assert "algorithm.gamma" in message
    assert "algorithm.adv_estimator" in message


def test_config_check_looks_for_what_the_configuration_names(cli: Cli, inputs: Path, tmp_path: Path):
    reward = tmp_path / "reward.py"
    reward.write_text("raise RuntimeError('a check runs no code of the user')\n\ndef compute_scores(**row): ...\n")
    wrong = [
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        f"data.train_files=[{inputs / 'tran.jsonl'},{inputs / 'train.jsonl'}]",
        f"data.val_files={tmp_path / 'nothing.parquet'}",
        f"custom_reward_function.path={reward}",
    ]
    check = ["config", "check", *base_overrides(inputs, tmp_path), *GRPO]
    said = refused(cli(*check, *wrong)).splitlines()
    assert [line.split(": ")[0] for line in said] == [
        "actor_rollout_ref.model.path",
        "data.train_files",
        "data.val_files",
        "custom_reward_function.path",
    ]
    assert said[1].endswith(f"no such file. Did you mean {inputs / 'train.jsonl'}?")
    assert said[3].endswith("reward.py: defines no compute_score. Did you mean compute_scores?")
    assert cli(*check, *wrong, "--no-files").out.endswith("the configuration is sound\n")
    assert cli(*check, *wrong[3:], "custom_reward_function.name=compute_scores").code == 0
    reward.write_text("def compute_score(answer, *, weights={'a': 1 + 1}, **row): ...\n")
    assert "defines compute_score(answer, *, weights={'a': 1 + 1}, **row), which is called" in refused(
        cli(*check, *wrong[3:])
    )


def test_config_check_reads_the_rows(cli: Cli, inputs: Path, tmp_path: Path):
    rows = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    train, val = tmp_path / "train.jsonl", tmp_path / "val.jsonl"
    write_jsonl(train, [{"question": row["prompt"]} for row in rows])
    write_jsonl(val, [*rows[:1] * FIRST_ROWS, rows[3] | {"reward_model": None}])
    check = ["config", "check", *base_overrides(inputs, tmp_path), *GRPO, f"data.train_files={train}"]
    said = refused(cli(*check, f"data.val_files={val}")).splitlines()
    assert said[0].startswith(f"data.train_files: {train}: not in the row layout: no `prompt`, `reward_model`, ")
    assert said[1].startswith(f"data.val_files: {val} row {FIRST_ROWS}: no `reward_model`, so no ground truth.")
    assert len(said) == 2
    assert cli(*check, "data.prompt_key=question", "data.data_source=tiny/sums", "--no-files").code == 0


def test_config_check_finds_rows_that_no_rule_scores(cli: Cli, inputs: Path, tmp_path: Path):
    row = json.loads((inputs / "train.jsonl").read_text().splitlines()[0])
    train = tmp_path / "train.jsonl"
    write_jsonl(train, [row | {"data_source": "openai/gsm8k"}, row | {"data_source": "openai/gsm8"}])
    check = [
        "config",
        "check",
        *base_overrides(inputs, tmp_path),
        *GRPO,
        f"data.train_files={train}",
        "data.val_files=[]",
    ]
    assert cli(*check).code == 0  # a function of the user's scores them
    said = refused(cli(*check, "~custom_reward_function.path"))
    assert said.startswith(
        f"data.train_files: {train} row 1: no reward for data_source 'openai/gsm8'. Did you mean openai/gsm8k?"
    )


def test_config_check_finds_programs_without_a_test(cli: Cli, inputs: Path, tmp_path: Path):
    row = json.loads((inputs / "train.jsonl").read_text().splitlines()[0])
    tests = {"style": "rule", "ground_truth": {"inputs": [], "outputs": []}}
    train = write_jsonl(tmp_path / "train.jsonl", [row | {"data_source": "apps", "reward_model": tests}])
    files = [f"data.train_files={train}", "data.val_files=[]", "~custom_reward_function.path"]
    said = refused(cli("config", "check", *base_overrides(inputs, tmp_path), *GRPO, *files))
    assert said.startswith(f"data.train_files: {train} row 0: the row has no test, so every answer would pass")


def test_config_check_finds_tests_that_a_column_filled_with_null(cli: Cli, inputs: Path, tmp_path: Path):
    import pyarrow.parquet

    row = json.loads((inputs / "train.jsonl").read_text().splitlines()[0])
    tests = {"fn_name": "f", "inputs": [[{"a": 1}], [{"b": 1}]], "outputs": [1, 1]}
    made = row | {"data_source": "apps", "reward_model": {"style": "rule", "ground_truth": tests}}
    train = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([made]), train)
    files = [f"data.train_files={train}", "data.val_files=[]", "~custom_reward_function.path"]
    said = refused(cli("config", "check", *base_overrides(inputs, tmp_path), *GRPO, *files))
    assert said.startswith(f"data.train_files: {train} row 0: input 0 has a mapping with null for 'b'")
    write_jsonl(tmp_path / "train.jsonl", [made])
    sound = cli("config", "check", *base_overrides(inputs, tmp_path), *GRPO, *files[1:],
                f"data.train_files={tmp_path / 'train.jsonl'}")  # fmt: skip
    assert sound.code == 0


def test_config_check_looks_for_what_a_control_run_names(cli: Cli, tmp_path: Path):
    wrong = [f"env.train.id={tmp_path / 'mine.py'}:Task-v0", f"actor_rollout_ref.model.path={tmp_path / 'start'}"]
    said = refused(cli("config", "check", *wrong)).splitlines()
    assert [line.split(": ")[0] for line in said] == ["actor_rollout_ref.model.path", "env.train.id"]
    (tmp_path / "mine.py").write_text("def (:")
    assert "mine.py: is not Python" in refused(cli("config", "check", wrong[0]))
    assert cli("config", "check", "env.train.id=CartPole-v1").code == 0


def test_config_show_says_where_values_come_from(cli: Cli, inputs: Path, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("algorithm:\n  lam: 0.9\n")
    said = cli("config", "show", str(file), *base_overrides(inputs, tmp_path), "algorithm.gamma=0.5")
    assert said.code == 0
    lines = {line.split(":")[0].strip(): line for line in said.out.splitlines() if ":" in line}
    assert "0.9" in lines["lam"]
    assert "run.yaml" in lines["lam"]
    assert "0.5" in lines["gamma"]
    assert "command line" in lines["gamma"]


def test_config_explain(cli: Cli):
    assert "algorithm.lam" in cli("config", "explain", "algorithm.lam").out
    sections = {line.split(" ")[0] for line in cli("config", "explain").out.splitlines()}
    assert {"algorithm", "critic.optim"} <= sections
    assert "critic.cliprange_value" in cli("config", "explain", "--search", "clip").out
    assert "algorithm.gamma" in refused(cli("config", "explain", "algorithm.gemma"))


def test_config_explain_of_a_run(cli: Cli, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("env: {train: {id: CartPole-v1}}\nalgorithm: {lam: 0.9}\n")
    assert "\n  in this run: 0.9 (run.yaml)\n" in cli("config", "explain", "algorithm.lam", str(file)).out
    said = cli("config", "explain", "data.max_prompt_length", str(file), "data.max_prompt_length=7").out
    assert "\n  in this run: 7 (command line)\n  does nothing in this run: env.train.id is set" in said
    said = cli("config", "explain", "algorithm.pf_ppo", str(file)).out
    assert "\nalgorithm.pf_ppo.weight_pow\n  in this run: 2.0 (default)\n" in said


def test_a_reward_is_tried_before_a_run(cli: Cli, run_arguments: tuple[list[str], Path], tmp_path: Path):
    arguments = [*run_arguments[0][1:], "actor_rollout_ref.rollout.n=2"]
    exact, substring = tmp_path / "exact.py", tmp_path / "substring.py"
    function = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {}\n"
    exact.write_text(function.format("solution_str == str(ground_truth)"))
    substring.write_text(function.format("str(ground_truth) in solution_str"))
    picture = tmp_path / "reward.png"
    options = ["--samples", "4", "--out", str(picture)]
    said = cli("reward", "check", *arguments, f"custom_reward_function.path={exact}", *options)
    assert said.code == 0, said.out
    assert re.search(r"^ground truth +high +1 +0 +1 +1 ", said.out, re.MULTILINE)
    assert re.search(r"^sampled ", said.out, re.MULTILINE)
    assert re.search(r"^  within a group +0 *\n  groups all equal +100% *$", said.out, re.MULTILINE)
    assert picture.stat().st_size > 5000
    said = cli("reward", "check", *arguments, f"custom_reward_function.path={substring}", "--samples", "0")
    assert said.code == 1
    assert "fault: a list of answers: scores 1 on average, the ground truth 1" in said.out
    assert "\nA fault means" in said.out
    assert "A look means" not in said.out
    assert "sampled" not in said.out
    assert "its simulator" in refused(cli("reward", "check", "env.train.id=CartPole-v1"))
    for out, says in (
        ("x.txt", "unknown image format"),
        ("nothing/x.png", "cannot be written"),
        (".", "unknown image format"),
    ):
        said = refused(cli("reward", "check", *arguments, "--samples", "4", "--out", out))
        assert f"--out={out}: {says}" in said


def test_a_reward_of_rules_is_tried_without_the_model(cli: Cli, run_arguments: tuple[list[str], Path], tmp_path: Path):
    """It reads texts alone: neither weights nor tokenizer nor held-out rows are looked for."""
    arguments = [*run_arguments[0][1:], "actor_rollout_ref.model.path=./not_there", "data.val_files=not_there.jsonl"]
    said = cli("reward", "check", *arguments, "--samples", "0")
    assert re.search(r"^empty +low ", said.out, re.MULTILINE), said.out + said.err
    assert "not_there" in refused(cli("reward", "check", *arguments, "--samples", "4"))
    assert "train.jsonl" in refused(
        cli("reward", "check", *arguments, "--samples", "0", "data.train_files=train.jsonl")
    )


def test_doctor_where_the_cache_cannot_be_written(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    said = cli("doctor")
    assert said.code == 0
    assert (
        f"not kept for `tether plan`: {tmp_path}/file/machine.json: cannot be written (File exists). Name" in said.out
    )
    assert "device: " in said.out
    assert "torch" in said.out
    assert "bfloat16" in said.out


def test_doctor_says_how_to_install_what_is_missing(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    from tether.commands import doctor

    missing = [f"a-package-that-is-not-here-{number}" for number in range(5)]
    monkeypatch.setattr(doctor, "EXTRAS", dict.fromkeys(missing, ("some", "nothing")))
    monkeypatch.chdir(ROOT)
    said = cli("doctor").out
    assert f"pip install -e '.[some]'  # {', '.join(missing)}\n" in said  # in a line, however long
    assert "pycosat" not in said
    monkeypatch.setattr(doctor, "EXTRAS", {"reasoning-gym": ("quickstart", "tasks")})
    monkeypatch.setattr(doctor, "_version", {}.get)
    monkeypatch.setenv("CC", "no-compiler")
    assert "reasoning-gym: one of its requirements, pycosat, comes as C source" in cli("doctor").out


def test_doctor_names_a_version_that_is_not_supported(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    from tether.commands import doctor

    needed = ["transformers<5.25,>=5.16", "torch>=2.11", "mujoco>=3.3; extra == 'mujoco'", "mujoco<4; extra == 'arms'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda package: needed)
    found = {"transformers": "99.0", "torch": "2.13.0+cpu", "mujoco": "4.0"}
    monkeypatch.setattr(doctor, "_version", found.get)
    printed = cli("doctor").out
    assert "pip install 'transformers<5.25,>=5.16'  # transformers\n" in printed
    assert "pip install 'torch" not in printed
    assert "pip install 'mujoco" not in printed


# --- a run from its first to its last command ---------------------------------------------------------------------


def test_train_reports_and_the_same_command_goes_on(cli: Cli, run_arguments: tuple[list[str], Path]):
    arguments, folder = run_arguments
    first = cli(*arguments)
    assert first.code == 0, first
    assert "training prompts: 10 prompts of 10 rows" in first.out
    assert "nothing suspicious found" in first.out
    assert "held-out score" in first.out
    assert f"checkpoint  {folder / 'global_step_3'} " in first.out
    assert "trainer.logger=[console,file]" in first.out  # brackets are no markup
    assert list(read_metrics(folder)) == [0, 1, 2, 3]
    weights = (folder / "global_step_3" / "actor" / "model.safetensors").read_bytes()
    second = cli(*arguments)
    assert second.code == 0
    assert f"resuming from {folder / 'global_step_3'}, step 3 of 3" in second.out
    assert "preflight" not in second.out
    assert "changed since" not in second.out
    assert list(read_metrics(folder)) == [0, 1, 2, 3]
    assert (folder / "global_step_3" / "actor" / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_after_a_chosen_checkpoint_the_shown_command_goes_on(cli: Cli, finished: Path, inputs: Path, tmp_path: Path):
    chosen = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={finished / 'global_step_2'}"]
    said = cli("train", *base_overrides(inputs, tmp_path / "run"), *GAE, "trainer.save_freq=3", *chosen)
    assert f"resuming from {finished / 'global_step_2'}" in said.out
    said = cli(*go_on(said.out))
    assert f"resuming from {tmp_path / 'run' / 'global_step_3'}, step 3 of 6" in said.out, said
    changed = [line for line in said.out.splitlines() if line.startswith("changed since that checkpoint: ")]
    assert changed == ["changed since that checkpoint: trainer.total_training_steps: 3 -> 6"]


def go_on(out: str) -> list[str]:
    """The arguments of the command of a report that resumes the run."""
    found = re.search(r"^resume +tether (train .*)$", out, re.MULTILINE)
    assert found, out
    return shlex.split(found[1])


def test_eval(cli: Cli, finished: Path, inputs: Path):
    said = cli("eval", str(finished), f"data.val_files={inputs / 'train.jsonl'}", "data.max_response_length=1")
    assert said.code == 0, said
    assert said.err.startswith(f"loading {finished} ...\n")  # at once, as what follows takes seconds
    assert "val-core/tiny/sums/reward/mean@1" in said.out
    samples = json.loads((finished / "eval_global_step_3.json").read_text())["samples"]
    cut = [sample["truncated"] for sample in samples]
    assert any(cut)
    assert f"{sum(cut)} of {len(samples)} replies were cut at data.max_response_length=1\n" in said.out
    assert all("digits" in sample["extra"] for sample in samples)


def test_eval_beside_a_checkpoint_where_nothing_can_be_written(cli: Cli, finished: Path, tmp_path: Path, inputs: Path):
    copy = shutil.copytree(finished, tmp_path / "run")
    out = copy / "eval_global_step_3.json"
    out.unlink(missing_ok=True)
    out.mkdir()
    said = cli("eval", str(copy), f"data.val_files={inputs / 'train.jsonl'}")
    assert said.code == 0, said
    assert "val-core/tiny/sums/reward/mean@1" in said.out
    assert f"not written to {out} (Is a directory): the metrics above are the only output" in said.out.replace(
        "\n", " "
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_errors_are_red_in_a_terminal_unless_colors_are_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["tether", "config", "explain", "algorithm.gemma"])
    for no_color, begins in (("", "\x1b[31malgorithm.gemma"), ("1", "algorithm.gemma")):
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        with pytest.raises(SystemExit, match="2"):
            main()
        assert terminal.getvalue().startswith(begins)


def test_a_read_only_disk_and_a_lack_of_memory_are_one_sentence(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "demos/videos")

    def allocate(*arguments: object) -> None:
        torch.empty(2**60)

    for fail, message in ((refuse, "demos/videos: Read-only file system"), (allocate, "out of memory in ")):
        monkeypatch.setattr("tether.commands.doctor.show_doctor", fail)
        said = cli("doctor")
        assert said.code == 2
        assert said.err.startswith(message)
        assert "Traceback" not in said.err


TETHER = [sys.executable, "-c", "from tether.commands.cli import main; main()"]


@pytest.fixture
def unread() -> Iterator[int]:
    """A pipe that nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


def test_output_that_nobody_reads_ends_a_command_as_other_tools(unread: int):
    for arguments in (["--help"], ["config", "show", "env.train.id=CartPole-v1"], ["model", "list"]):
        done = subprocess.run([*TETHER, *arguments], stdout=unread, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == (141, ""), arguments


def test_an_error_keeps_its_code_when_nobody_reads_it(unread: int):
    done = subprocess.run([*TETHER, "config", "check", "algorithm.lam=5"], stdout=unread, stderr=unread, check=False)
    assert done.returncode == 2


def test_eval_of_a_model_before_training(cli: Cli, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    overrides = base_overrides(inputs, tmp_path / "run")
    file.write_text(load_config(None, [*overrides, *GAE]).to_yaml())
    model = next(Path(item.split("=")[1]) for item in overrides if item.startswith("actor_rollout_ref.model.path="))
    said = cli("eval", str(model), str(file), "trainer.seed=3")
    assert said.code == 0, said
    assert "val-core/tiny/sums/reward/mean@1" in said.out
    written = json.loads((tmp_path / f"eval_{model.name}.json").read_text())
    kept = [item for item in overrides if not item.startswith(("data.train_files", "actor_rollout_ref.model.path"))]
    without_file = cli("eval", str(model), *kept, "trainer.seed=3")
    assert without_file.code == 0, without_file
    assert json.loads((tmp_path / f"eval_{model.name}.json").read_text()) == written
    assert not (tmp_path / f"eval_{model.name}-2.json").exists()
    assert not (tmp_path / "run").exists()
    assert "data.val_files" in refused(cli("eval", str(model)))
    assert "no directory here" in refused(cli("eval", "nobody/nothing", *kept))


@pytest.mark.parametrize("command", [["eval"], ["generate", "1+1?"]])
def test_a_damaged_checkpoint_is_refused_by_name(cli: Cli, finished: Path, tmp_path: Path, command: list[str]):
    copies = tmp_path / "run"
    for step in (2, 3):
        shutil.copytree(finished / f"global_step_{step}", copies / f"global_step_{step}")
    name, *rest = command
    file = copies / "global_step_3" / "actor" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for named in (copies, copies / "global_step_3"):
        message = refused(cli(name, str(named), *rest))
        assert f"{file}: damaged" in message
        assert f"The last good one in that folder is {copies / 'global_step_2'}." in message
    file.unlink()
    assert f"{file}: missing" in refused(cli(name, str(copies), *rest))
    assert not list(copies.glob("eval_*"))


def test_generate(cli: Cli, finished: Path, monkeypatch: pytest.MonkeyPatch):
    for model in (finished, finished / "global_step_3", finished / "global_step_3" / "actor"):
        said = cli("generate", str(model), "1+1?", "2+2?", "--max-new-tokens", "3", "--n", "2", "--temperature", "1")
        assert said.code == 0, said
        assert said.err.startswith(f"loading {model} ...\n")  # not on standard output, which has the replies alone
        assert said.out.count("--- 1+1?\n") == said.out.count("--- 2+2?\n") == 2
    assert "no checkpoint" in refused(cli("generate", str(finished.parent), "1+1?"))
    (prompts := finished.parent / "prompts.txt").write_text("3+3?\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("4+4?\n"))
    said = cli("generate", str(finished), "-", f"@{prompts}", "--max-new-tokens", "3")
    assert said.out.index("--- 4+4?\n") < said.out.index("--- 3+3?\n")
    one = ["generate", str(finished), "1+1?", "--max-new-tokens", "9", "--temperature"]
    assert cli(*one, "1", "--top-k", "1").out == cli(*one, "0").out != cli(*one, "1").out
    hot = [*one, "9", "--n", "8"]
    longest = max(cli(*hot).out.split("--- 1+1?\n"), key=len)
    stopped = cli(*hot, "--stop", longest[0]).out.split("--- 1+1?\n")
    assert longest not in stopped
    assert not [reply for reply in stopped if longest[0] in reply.rstrip("\n")[:-1]]


def test_plot(cli: Cli, finished: Path, tmp_path: Path):
    picture = tmp_path / "curves.png"
    said = cli("plot", str(finished), "--out", str(picture))
    assert said.code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "metrics.jsonl" in refused(cli("plot", str(tmp_path)))


# --- what goes wrong ----------------------------------------------------------------------------------------------


def test_unusable_input(cli: Cli, inputs: Path, tmp_path: Path):
    arguments = ["train", *base_overrides(inputs, tmp_path / "run"), *GAE]
    assert "nothing.jsonl" in refused(cli(*arguments, f"data.train_files={inputs / 'nothing.jsonl'}"))
    assert "modle" in refused(cli(*arguments, f"actor_rollout_ref.model.path={inputs / 'modle'}"))


def test_a_value_error_of_the_users_own_code_keeps_its_traceback(cli: Cli, inputs: Path, tmp_path: Path):
    """Its text alone would tell neither where it was raised nor by whom."""
    (tmp_path / "mine.py").write_text(
        "class Data:\n"
        "    def __init__(self, *_, **__):\n"
        "        raise ValueError('boom')\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, at): return {}\n"
    )
    options = [f"data.custom_cls.path={tmp_path / 'mine.py'}", "data.custom_cls.name=Data"]
    said = cli("train", *base_overrides(inputs, tmp_path / "run"), *GRPO, *options)
    assert said.code == 1
    assert "Traceback" in said.err
    assert "mine.py" in said.err
    assert said.err.rstrip().endswith("ValueError: boom")


def test_a_refusing_preflight(cli: Cli, inputs: Path, tmp_path: Path):
    reward = tmp_path / "abstains.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return None\n")
    overrides = [*base_overrides(inputs, tmp_path / "run"), *GAE, f"custom_reward_function.path={reward}"]
    said = cli("train", *overrides)
    assert "trainer.preflight=False" in refused(said)
    assert "refused: no sampled response has a reward" in said.out
    assert cli("train", *overrides, "trainer.preflight=False").code == 0


def test_ctrl_c_before_training(cli: Cli, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tether.commands.train.build", interrupted)
    said = cli("train", *base_overrides(inputs, tmp_path / "run"), *GAE)
    assert said.code == 130
    assert said.err == "interrupted; run the same command again to start, or to resume from the last checkpoint\n"


def test_imports_are_not_searched_for_garbage():
    """Garbage that is made later is, and a process that had imported torch itself is left as it was."""
    lines = [
        "import gc",
        "from tether.commands.cli import _importing",
        "with _importing():",
        "    assert not gc.isenabled()",
        "assert gc.get_freeze_count() > 10_000 and gc.isenabled()",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, check=True)
    before = gc.get_freeze_count()
    with _importing():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_a_failing_reward_is_one_error(cli: Cli, inputs: Path, tmp_path: Path):
    reward = tmp_path / "raises.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 'yes'\n"
    )
    overrides = [*base_overrides(inputs, tmp_path / "run"), *GRPO, f"custom_reward_function.path={reward}"]
    message = refused(cli("train", *overrides))
    assert "rewards failed" in message
    assert "returned str 'yes'" in message


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may become longer than 64 KiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("small_files")
def test_a_limit_of_file_sizes_that_a_checkpoint_exceeds(cli: Cli, inputs: Path, tmp_path: Path):
    overrides = [*base_overrides(inputs, tmp_path / "run"), *GRPO, "trainer.save_freq=1", "trainer.preflight=False"]
    message = refused(cli("train", *overrides))
    assert f"a file of {tmp_path / 'run' / 'global_step_1'} is larger than may be written there" in message
    assert "Errno" not in message
    assert not list((tmp_path / "run").glob("*global_step*"))


CONTROL_RUN = [
    "train", "env.train.id=CartPole-v1", "env.train.total_num_envs=2", "env.train.max_steps_per_rollout_epoch=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16", "trainer.val_before_train=False",
]  # fmt: skip


@pytest.mark.slow
def test_a_control_run_outlives_its_reader_saves_on_sigterm_and_resumes(cli: Cli, unread: int, tmp_path: Path):
    """In a process of its own, as on a user's machine; it loads no transformers, which takes a second to import."""
    pytest.importorskip("gymnasium")
    folder, last = tmp_path / "run", "trainer.total_training_steps={}".format
    arguments = [*CONTROL_RUN, f"trainer.default_local_dir={folder}"]
    code = f"""
import sys
from tether.commands.cli import main
try:
    main()
finally:
    import tether
    tether.load({str(folder)!r}).predict([0.0, 0.0, 0.0, 0.0])
    assert "transformers" not in sys.modules
"""
    hidden = ("GLIBC_TUNABLES", "TETHER_HUGE_PAGES")
    environment = {key: value for key, value in os.environ.items() if key not in hidden} | {"PYTHONPATH": f"{ROOT}/src"}
    command = [sys.executable, "-c", code, *arguments, last(10**6)]
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=unread, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not ((folder / "metrics.jsonl").exists() and read_metrics(folder)):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert err.count("nobody reads it any more") == 1
    assert "SIGTERM: finishing this step" in err
    step = int((folder / TRACKER).read_text())
    assert (folder / f"global_step_{step}" / MANIFEST).exists()
    assert max(read_metrics(folder)) == step < 10**6
    said = cli(*arguments, last(step + 1))
    assert said.code == 0, said
    assert f"resuming from {folder / f'global_step_{step}'}" in said.out
    assert max(read_metrics(folder)) == step + 1
