"""Shell scripts that start verl: bash runs them in a sandbox that records their commands, and tether writes a file."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.text.rewards.sandbox.machine import confined
from tether.commands.cli import app
from tether.config import ConfigError, load_config
from tether.integrations.verl.command import translate
from tether.integrations.verl.recorder import Recorder, Recording
from tether.text.rewards.sandbox import bubblewrap

pytestmark = confined
HOME = {"HOME": "/home/me", "PWD": "/home/me/work"}


def recorded(folder: Path, text: str, *arguments: str, **variables: str) -> Recording:
    return Recorder(folder / "run.sh", text, HOME | variables, arguments).run_until_complete()[1]


def describe_error(folder: Path, text: str, *arguments: str, **variables: str) -> list[str]:
    """The calls of `cmd`, each as one line."""
    calls = recorded(folder, text, *arguments, **variables).calls
    return [" ".join(call.words[1:]) for call in calls if call.words[0].endswith("cmd")]


CASES = {
    "quotes and arrays": ("""A=(a "b c")\ncmd "${A[@]}" 'd e'$HOME""", ["a b c d e/home/me"]),
    "a default in the environment": ("cmd ${B:-no} ${SET:-no}", ["no yes"]),
    "functions and conditions": ("f() { if [ $1 = 8 ]; then cmd $2; fi; }\nf 8 a\nf 9 b", ["a"]),
    "arguments": ('cmd $1 "$#"\nshift\ncmd "$@"', ["x 2", "y"]),
    "a pipe": ("cmd a 2>&1 | tee log.txt\ncmd b > out/log.txt", ["a", "b"]),
    "another process": ("cmd a &\nwait\n(cmd b)\nX=$(cmd c)", ["a", "b", "c"]),
    "exec": ("exec > >(tee log) 2>&1\nexec cmd a\ncmd b", ["a"]),
    "another shell": ("export A=1\nbash -c 'cmd $A'\nnohup sh -c \"cmd 2\" &\nwait\n/bin/bash -lc 'cmd 3'",
                      ["1", "2", "3"]),
    "programs by path": ("/opt/conda/bin/cmd a\n$HOME/bin/cmd b", ["a", "b"]),
    "folders": ("cd /verl && cmd $PWD\ncd $HOME/x || exit 1\ncmd $(pwd)\ncmd $OLDPWD",
                ["/verl", "/home/me/x", "/verl"]),
    "files that are not there": ("set -e\nsource venv/bin/activate\n. ~/.bashrc\ncmd a", ["a"]),
    "its own folder": ('cmd $(basename "$0" .sh) $(cd "$(dirname "$0")" && ls)', ["run run.sh"]),
    "a path that is replaced": ("PATH=/usr/local/bin:/usr/bin\ncmd a\npython3 -c 'print(1)'", ["a"]),
    "a program that asks for packages": ("python -c 'import torch_npu' && A=npu || A=gpu\ncmd $A", ["gpu"]),
    "limits of the shell": ("set -e\nulimit -n 65535\ncmd a", ["a"]),
}  # fmt: skip


def test_commands_are_those_that_bash_would_start(tmp_path: Path) -> None:
    found = {name: describe_error(tmp_path, text, "x", "y", SET="yes") for name, (text, _) in CASES.items()}
    assert found == {name: words for name, (_, words) in CASES.items()}


def test_calls_have_their_line_and_environment(tmp_path: Path) -> None:
    text = "export A=1\nf() {\n  B=2 cmd x \\\n    y\n}\nf\nbash -c '\ncmd z'"
    inner, outer = [call for call in recorded(tmp_path, text).calls if call.words[0] == "cmd"]
    assert (inner.line, inner.words, inner.environment) == (3, ("cmd", "x", "y"), {"A": "1", "B": "2"})
    assert (outer.line, outer.environment) == (7, {"A": "1"})


def test_calls_at_once_are_not_mixed_up(tmp_path: Path) -> None:
    text = 'for i in {1..8}; do cmd "$(printf "$i%.0s" {1..9000})" & done\nwait'
    assert sorted(describe_error(tmp_path, text)) == [str(index) * 9000 for index in range(1, 9)]


def test_a_script_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither files, nor the network, nor other programs of this machine are in reach."""
    monkeypatch.setenv("HF_TOKEN", "hidden")
    kept = tmp_path / "kept"
    kept.write_text("mine")
    text = (
        f"rm -rf {tmp_path} /usr/bin/cat 2> /dev/null\necho x > {tmp_path}/new\n"
        f"cmd $(cat {kept}) $(ls /root /etc/passwd) $(ls /usr/bin | grep -c python) $HF_TOKEN\n"
        "if (echo > /dev/tcp/127.0.0.1/22) 2> /dev/null; then cmd reached; fi\ncmd $(ls /home)"
    )
    assert describe_error(tmp_path, text) == ["0", "me"]
    assert kept.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(("text", "expected"), [
    ("while true; do :; done", "did not end within 11 s"),
    ("A=aa\nwhile true; do A=$A$A; done", "cannot allocate"),
    ("while true; do echo " + "x" * 10000 + "; done", "exceeded the limit of output"),
    ("[ -f data.parquet ] || { echo no data; exit 3; }", "ended with exit code 3, and last wrote 'no data'"),
    ("set -u\necho $1", "$1: unbound variable"),
])  # fmt: skip
def test_how_a_script_ends_before_it_starts_verl_is_said(tmp_path: Path, text: str, expected: str) -> None:
    limit = "did not end within"  # which a busy machine may reach before the others
    with pytest.raises(ConfigError, match=rf"starts no trainer of verl's: it .*({re.escape(expected)}|{limit})"):
        translate(written(tmp_path, f"{text}\n{M}data.seed=1"), [])


def test_without_bubblewrap_a_sentence_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bubblewrap.confinement_problem.cache_clear()
    monkeypatch.setattr(bubblewrap, "PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"bwrap is not installed .*apt-get install bubblewrap.*or write the"):
        translate(written(tmp_path, f"{M}data.seed=1"), [])
    bubblewrap.confinement_problem.cache_clear()


UNKNOWN = {
    "data.seed=$X": r"is \$X in the script, and \$X is known only when it is run\. export what it needs",
    "data.seed=$2": r"is \$2 in the script, and \$2 is known only when it is run\. give it behind the script",
    "data.seed=$(nvidia-smi -L | wc -l)": "is 1 here, but depends on what programs print",
    "data.seed=$(($(nproc) / 2))": "depends on what programs print",
    "trainer.experiment_name=$(python3 -c 'print(3)')": "depends on what programs print",
}


def test_what_only_a_run_could_tell_is_refused_unless_it_is_given(tmp_path: Path) -> None:
    for setting, expected in UNKNOWN.items():
        script = written(tmp_path, f"{M}{setting} trainer.nnodes=1")
        with pytest.raises(ConfigError, match=expected):
            translate(script, [])
        key = setting.split("=")[0]
        tree = yaml.safe_load(translate(script, [f"{key}=3"])[0])
        assert tree.pop("trainer")["nnodes"] == 1, setting


def test_what_a_script_sets_itself_is_known(tmp_path: Path) -> None:
    text = f'[ -z "$X" ] && X=3\nread -r Y <<< 4\nA=1\n{M}data.seed=$X trainer.nnodes=$Y trainer.seed=${{Z:-}}$A'
    tree = yaml.safe_load(translate(written(tmp_path, text), [])[0])
    assert tree == {"data": {"seed": 3}, "trainer": {"nnodes": 4, "seed": 1}}


SCRIPT = """set -x
MODEL=${MODEL:-Qwen/Qwen2-7B}
files="['$HOME/a.parquet', '$HOME/b.parquet']"
export VLLM_ATTENTION_BACKEND=XFORMERS HF_TOKEN=hf_1 WANDB_API_KEY=$TOLD
%s \\
    algorithm.adv_estimator=gae \\
    data.train_files="$files" data.val_files=$HOME/a.parquet \\
    actor_rollout_ref.model.path=$MODEL critic.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    trainer.logger='["console","wandb"]' \\
    trainer.total_epochs=15 trainer.total_epochs=3 trainer.n_gpus_per_node=1 $@ 2>&1 | tee log.txt
"""
STARTS = (
    "python3 -m verl.trainer.main_ppo",
    "CUDA_VISIBLE_DEVICES=0 python -u -m verl.trainer.main_ppo",
    "ray job submit --no-wait -- python3 -m verl.trainer.main_ppo",
    "nsys profile -o x python verl/trainer/main_ppo.py",
    "cd /verl && python -m recipe.dapo.src.main_dapo",
    "python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_trainer'",
)


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.sh"
    file.write_text(text)
    return file


@pytest.mark.parametrize("start", STARTS)
def test_the_file_loads_to_what_the_script_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    text, listing = translate(written(tmp_path, SCRIPT % start), [])
    assert listing == ""
    assert "settings: VLLM_ATTENTION_BACKEND, HF_TOKEN, WANDB_API_KEY" in text.splitlines()[1]
    assert "hf_1" not in text
    file = tmp_path / "run.yaml"
    file.write_text(text)
    config = load_config(file, []).config
    assert config.data.train_files == ("/home/me/a.parquet", "/home/me/b.parquet")
    assert config.critic.model.path == "Qwen/Qwen2-7B"
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.trainer.logger == ("console", "wandb")
    assert config.trainer.total_epochs == 3


def test_a_script_that_chooses_its_launcher_is_translated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape of verl's examples since 2026: settings in arrays, and ``uv run`` unless the environment says no."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    script = written(
        tmp_path,
        r"""#!/usr/bin/env bash
set -xeuo pipefail

########################### user-adjustable ###########################
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
BACKEND=${BACKEND:-vllm}
MODEL=${MODEL:-Qwen/Qwen3-8B}
CRITIC=${CRITIC:-$MODEL}
DEVICES=${DEVICES:-}
NAME=${NAME:-ppo_${BACKEND}_$(date +%Y%m%d)}
TRAIN_FILE=${TRAIN_FILE:-$HOME/gsm8k/train.parquet}

devices=${DEVICES:-8}
DATA=(
    algorithm.adv_estimator=gae
    data.train_files="['$TRAIN_FILE', '$HOME/math/train.parquet']"
    data.val_files="['$HOME/gsm8k/test.parquet']"
    data.truncation='error'
)
MODELS=(
    actor_rollout_ref.model.path="$MODEL"
    critic.model.path="$CRITIC"
    critic.fsdp.param_offload=False
)
TRAINER=(
    actor_rollout_ref.rollout.name=${BACKEND}
    trainer.logger='["console","wandb"]'
    trainer.experiment_name=${NAME}
    trainer.n_gpus_per_node=${devices}
)

########################### launch ###########################
LAUNCH=(python3)
RAY=(ray_kwargs.ray_init.runtime_env.py_executable=null)
if [ "${USE_UV:-1}" != 0 ] && [ "${DEVICE:-gpu}" = gpu ] && { [ "$BACKEND" = vllm ] || [ "$BACKEND" = sglang ]; }; then
    LAUNCH=(uv run --frozen --all-packages --extra "$BACKEND" --extra fsdp python3)
    RAY=(ray_kwargs.ray_init.runtime_env.py_executable="uv -v run --frozen --extra $BACKEND --extra fsdp")
fi
PYTHONUNBUFFERED=1 "${LAUNCH[@]}" -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    "${MODELS[@]}" \
    "${TRAINER[@]}" \
    "${RAY[@]}" \
    "$@"
""",
    )
    file = tmp_path / "run.yaml"
    for use_uv, executable in (("1", "uv -v run --frozen --extra vllm --extra fsdp"), ("0", None)):
        monkeypatch.setenv("USE_UV", use_uv)
        text, listing = translate(script, ["trainer.total_epochs=2"])
        assert listing == "", use_uv
        assert "PYTHONUNBUFFERED" in text.splitlines()[1]
        file.write_text(text)
        config = load_config(file, []).config
        assert config.data.train_files == ("/home/me/gsm8k/train.parquet", "/home/me/math/train.parquet")
        assert config.critic.model.path == "Qwen/Qwen3-8B"
        assert config.trainer.experiment_name.startswith("ppo_vllm_2")
        assert (config.trainer.n_gpus_per_node, config.trainer.total_epochs) == (8, 2)
        assert config.ray_kwargs.ray_init["runtime_env"] == {"py_executable": executable}


def test_the_environment_and_overrides_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "mine")
    text, _ = translate(written(tmp_path, SCRIPT % STARTS[0]), ["trainer.total_epochs=7"])
    tree = yaml.safe_load(text)
    assert tree["actor_rollout_ref"]["model"]["path"] == "mine"
    assert tree["trainer"]["total_epochs"] == 7


def test_what_keeps_it_from_being_run_is_listed(tmp_path: Path) -> None:
    script = SCRIPT.replace("trainer.total_epochs=15", "critic.no_such_key=2 \\  # why\n    trainer.nnodes=2")
    text, listing = translate(written(tmp_path, script % STARTS[0]), [])
    assert yaml.safe_load(text)["critic"]["no_such_key"] == 2
    assert "total_epochs" not in text  # below the comment, as for bash
    lines = listing.splitlines()
    assert lines[0] == "line 11: a comment follows the backslash, so the command ends here; what is below is not passed"
    assert lines[1] == "to be changed before it runs:"
    assert "critic.no_such_key: unknown key" in listing


@pytest.mark.parametrize("between", ["\\\n\n", "\\\n  \n", "\n"])
def test_settings_behind_the_end_of_a_command_are_listed(tmp_path: Path, between: str) -> None:
    """An empty line ends a command, and bash takes the next setting for a command."""
    script = f"python -m verl.trainer.main_ppo data.seed=1 {between} +critic.optim.lr=2 \\\n trainer.nnodes=1"
    text, listing = translate(written(tmp_path, script), [])
    assert "critic" not in text
    line = script[: script.index("+critic")].count("\n") + 1
    assert f"line {line}: +critic.optim.lr=2 and what follows stands apart from the command" in listing


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("echo nothing", "starts no trainer of verl's"),
        ("cat <<E\npython -m verl.trainer.main_ppo a.b=1\nE", "line 2 names one, in text, a comment"),
        ("python -m verl.trainer.main_ppo a.b=1\npython -m verl.trainer.main_ppo a.b=2", "2 times, in lines 1, 2"),
        ("python -m verl.trainer.main_ppo --config-name=own a.b=1", "is a file of the script's own"),
        (
            "python -m verl.trainer.main_ppo data.seed=$(nproc)",
            "data.seed: is 1 here, but depends on what programs print",
        ),
        ("python -m verl.trainer.main_ppo 'a b'", "cannot be read"),
        ("python -m verl.trainer.main_ppo a.b=1 \\ # why\nc.d=2", "run.sh: line 1: a comment follows the backslash"),
        (
            "python -m verl.trainer.main_ppo data.seed=$X \\\n  # why\nc.d=2",
            "run.sh: line 2: a comment between the lines of a command ends it",
        ),
    ],
)
def test_what_cannot_be_translated_is_one_error(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        translate(written(tmp_path, text), [])


def test_a_place_that_a_list_does_not_have_is_named_from_the_top(tmp_path: Path) -> None:
    script = written(tmp_path, M + "'data.apply_chat_template_kwargs={x: [1]}' data.apply_chat_template_kwargs.x.3=2")
    with pytest.raises(ConfigError, match=r"data\.apply_chat_template_kwargs\.x\.3: is no index of the list"):
        translate(script, [])


def test_a_value_that_is_unknown_may_be_given(tmp_path: Path) -> None:
    script = written(tmp_path, "python -m verl.trainer.main_ppo data.seed=$(nproc) trainer.nnodes=1")
    text, _ = translate(script, ["data.seed=3"])
    assert yaml.safe_load(text) == {"trainer": {"nnodes": 1}, "data": {"seed": 3}}


@pytest.mark.parametrize("append", ['if [ -n "$T" ]; then\nC+=(%s)\nfi', '[ -n "$T" ] && C+=(%s)'])
def test_a_setting_is_appended_where_the_environment_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, append: str
) -> None:
    setting = "trainer.total_training_steps=$T"
    script = written(tmp_path, f'C=({M}trainer.nnodes=1)\n{append % setting}\nA=1 "${{C[@]}}" data.seed=2')
    assert yaml.safe_load(translate(script, [])[0]) == {"trainer": {"nnodes": 1}, "data": {"seed": 2}}
    monkeypatch.setenv("T", "5")
    assert yaml.safe_load(translate(script, [])[0])["trainer"] == {"nnodes": 1, "total_training_steps": 5}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        translate(tmp_path / "no.sh", [])


M = "python3 -m verl.trainer.main_ppo "


@pytest.mark.parametrize(
    "overrides",
    [
        "trainer.seed=5 trainer={total_epochs:4}",
        "trainer={seed:5,total_epochs:4} ~trainer.seed",
        "trainer.seed=5 ~trainer data.seed=1",
        "trainer.seed=5 ~trainer.seed trainer.seed=6",
        "actor_rollout_ref.rollout.engine_kwargs={vllm:{a:1}} actor_rollout_ref.rollout.engine_kwargs.vllm.b=2",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.b=2 +actor_rollout_ref.rollout.engine_kwargs={vllm:{a:{c:1}}}",
        "actor_rollout_ref.actor.ppo_micro_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.actor={ppo_micro_batch_size:4}",
        "reward.custom_reward_function={name:a} custom_reward_function.name=b",
        "trainer.logger=[console] trainer.logger=[wandb]",
        "critic.model.override_config={attention_dropout:0.1} critic.model.override_config.embd_pdrop=0.2",
    ],
)
def test_the_file_loads_to_what_the_settings_load_to(tmp_path: Path, overrides: str) -> None:
    given = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m", *overrides.split()]
    text, _ = translate(written(tmp_path, M + " ".join(f"'{one}'" for one in given)), [])
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert load_config(file, []).config == load_config(None, given).config


@pytest.mark.parametrize(
    "script",
    [
        "export VERL_USE_MODELSCOPE=True\n" + M,
        "VERL_USE_MODELSCOPE=True " + M,
        "env VERL_USE_MODELSCOPE=True " + M,
        """ray job submit --runtime-env-json='{"env_vars": {"VERL_USE_MODELSCOPE": "True"}}' -- """ + M,
        """ray job submit --runtime-env-json '{"env_vars": {"VERL_USE_MODELSCOPE": "True"}}' -- """ + M,
    ],
)
def test_modelscope_is_told(tmp_path: Path, script: str) -> None:
    text, listing = translate(written(tmp_path, script + "data.seed=1"), [])
    assert "VERL_USE_MODELSCOPE=True is set there and no setting" in listing
    assert "VERL_USE_MODELSCOPE" in text.splitlines()[1]


@pytest.mark.parametrize(
    "trainer",
    ["recipe.sppo.main_sppo", "recipe.spin.main_spin", "verl.experimental.one_step_off_policy.main_ppo",
     "verl.experimental.fully_async_policy.fully_async_main", "verl.trainer.main_generation", "verl.trainer.main_eval",
     "verl.trainer.fsdp_sft_trainer"],
)  # fmt: skip
def test_other_trainers_are_refused_by_name(tmp_path: Path, trainer: str) -> None:
    with pytest.raises(ConfigError, match=rf"line 1 starts {trainer}, which is not verl\.trainer\.main_ppo"):
        translate(written(tmp_path, f"python -m {trainer} data.seed=1"), [])


@pytest.mark.parametrize("option", ["--config-path=", "--config-dir "])
@pytest.mark.parametrize("folder", ["/my/conf", "/my/config", "conf"])
def test_a_folder_of_configurations_is_told(tmp_path: Path, option: str, folder: str) -> None:
    script = f"{M}{option}{folder} --config-name=ppo_trainer data.seed=1"
    _, listing = translate(written(tmp_path, script), [])
    assert f"--config-path={folder} was taken for verl's own; if it has a ppo_trainer.yaml" in listing


def test_secrets_in_settings_are_told(tmp_path: Path) -> None:
    _, listing = translate(written(tmp_path, M + "reward_model.server.api_key=s"), [])
    assert "passwords or keys" in listing


def test_secrets_of_the_caller_are_read_when_the_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_PASS"):
        monkeypatch.setenv(name, "hidden")
    variables = "+ray_kwargs.ray_init.runtime_env.env_vars"
    settings = [f"{variables}.WANDB_API_KEY=$WANDB_API_KEY", "trainer.experiment_name=run-$HF_TOKEN-${MY_PASS:-none}"]
    text, listing = translate(written(tmp_path, M + " ".join(settings)), [])
    assert "hidden" not in text
    tree = yaml.safe_load(text)
    assert tree["trainer"]["experiment_name"] == "run-${oc.env:HF_TOKEN}-${oc.env:MY_PASS}"
    assert tree["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"] == {"WANDB_API_KEY": "${oc.env:WANDB_API_KEY}"}
    assert "passwords or keys" not in listing


@pytest.mark.parametrize("part", ["${HF_TOKEN:0:4}", "${HF_TOKEN##*_}", "${#HF_TOKEN}", "$(basename $HF_TOKEN)"])
def test_no_part_of_a_secret_is_made_of_what_stands_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hidden")
    with pytest.raises(ConfigError, match="is known only when it is run"):
        translate(written(tmp_path, f"{M}trainer.experiment_name={part}"), [])


def test_the_present_folder_is_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/here")
    text, _ = translate(written(tmp_path, f"{M}data.train_files=$PWD/a.parquet data.val_files=$(pwd)/b.parquet"), [])
    assert yaml.safe_load(text)["data"] == {"train_files": "/here/a.parquet", "val_files": "/here/b.parquet"}


@pytest.mark.parametrize("command", ["echo", "pkill -f", "pgrep -f", "grep -c x", "/usr/bin/cat"])
def test_a_command_that_mentions_the_trainer_is_no_start(tmp_path: Path, command: str) -> None:
    script = written(tmp_path, f"{command} main_ppo.py\n{command} -m verl.trainer.main_ppo\n{M}data.seed=1")
    assert yaml.safe_load(translate(script, [])[0]) == {"data": {"seed": 1}}


@pytest.mark.parametrize("start", ["exec ", "nohup ", "bash -c '", 'docker exec -it c bash -lc "cd /verl && '])
def test_a_trainer_behind_another_command_is_one(tmp_path: Path, start: str) -> None:
    end = {"'": "'", '"': '"'}.get(next((char for char in start if char in "'\""), ""), "")
    text, _ = translate(written(tmp_path, f"{start}{M}data.seed=1{end}"), [])
    assert yaml.safe_load(text) == {"data": {"seed": 1}}


def test_what_a_run_would_source_is_listed(tmp_path: Path) -> None:
    text, listing = translate(written(tmp_path, ". ./env.sh\npython $X/trainer/main_ppo.py data.seed=1"), [])
    assert text.startswith("# The settings of run.sh, line 2 (/trainer/main_ppo.py).")
    assert listing.startswith("line 1: source ./env.sh is not read: what it sets is unknown")


@pytest.mark.parametrize(("word", "advice"), [
    ('data.custom={"a","b"}', """write 'data.custom={"a","b"}'"""),
    ("data.custom={a:$N,b:2}", 'write "data.custom={a:$N,b:2}"'),  # not '...', in which $N stays as it is
    ("data.custom={a:'x y',b:2}", """write "data.custom={a:'x y',b:2}\""""),
    ("""data.custom={a:"$N",b:'c'}""", "write all of it in quotes"),
])  # fmt: skip
def test_advice_on_quotes_is_what_bash_reads_as_it_is_meant(tmp_path: Path, word: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(written(tmp_path, f"N=3\n{M}{word}"), [])
    assert str(caught.value).endswith(advice)


def test_arguments_before_an_unknown_one_are_known(tmp_path: Path) -> None:
    body = f'local seed=$1; shift\n{M} data.seed=$seed "$@"'
    script = written(tmp_path, f"run() {{ {body}\n}}\nrun 5 trainer.seed=$(nproc)")
    with pytest.raises(ConfigError, match=r"^trainer\.seed: is 1 here[^\n]*$"):
        translate(script, [])
    assert yaml.safe_load(translate(script, ["trainer.seed=4"])[0]) == {"data": {"seed": 5}, "trainer": {"seed": 4}}


def test_a_file_that_is_not_written_is_said(tmp_path: Path) -> None:
    script, out = written(tmp_path, M + "data.seed=$(nproc)"), tmp_path / "run.yaml"
    with pytest.raises(ConfigError, match=rf"(?s)data\.seed: is 1 here.*\n--out {out}: is not written"):
        CliRunner().invoke(app, ["config", "import-verl", str(script), "-o", str(out)], catch_exceptions=False)
    assert not out.exists()


def test_all_that_is_wrong_is_in_one_error(tmp_path: Path) -> None:
    script = written(tmp_path, M + "trainer.nnodes=$(x) data.custom={a:1,b:2} critic.no_such_key=2")
    with pytest.raises(ConfigError) as caught:
        translate(script, [])
    found = str(caught.value)
    assert "trainer.nnodes: is 1 here" in found
    assert "{a:1,b:2} is not in quotes, so that bash makes several words of it. write 'data.custom={a:1,b:2}'" in found
    assert "critic.no_such_key: unknown key" in found


def test_options_of_hydra_take_their_values_along(tmp_path: Path) -> None:
    text, listing = translate(written(tmp_path, M + "--cfg job data.seed=1 --package foo"), [])
    assert yaml.safe_load(text) == {"data": {"seed": 1}}
    assert "--cfg job is no setting and was left out" in listing


def test_where_the_file_went_is_said(tmp_path: Path) -> None:
    script, out = written(tmp_path, M + "data.seed=1"), tmp_path / "run.yaml"
    done = CliRunner().invoke(app, ["config", "import-verl", str(script), "-o", str(out)])
    assert f"written to {out}" in done.output


def test_a_first_line_behind_a_byte_order_mark_counts(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"S=3\n{M}data.seed=$S", encoding="utf-8-sig")
    assert yaml.safe_load(translate(script, [])[0]) == {"data": {"seed": 3}}


def test_a_backslash_in_a_comment_is_told(tmp_path: Path) -> None:
    _, listing = translate(written(tmp_path, M + "data.seed=3 # why \\\n  trainer.seed=4\n"), [])
    assert listing.startswith("line 1: the backslash is part of a comment, so the command ends here")


def test_a_function_that_starts_the_trainer_is_followed(tmp_path: Path) -> None:
    script = written(tmp_path, f'SEED=1\nrun() {{\n{M} data.seed=$SEED "$@"\n}}\nSEED=5 run trainer.seed=2\nSEED=6')
    assert yaml.safe_load(translate(script, [])[0]) == {"data": {"seed": 5}, "trainer": {"seed": 2}}


def test_a_function_that_starts_the_trainer_twice_is_refused(tmp_path: Path) -> None:
    script = written(tmp_path, f"run() {{\n{M} data.seed=$1\n}}\nrun 1\nrun 2")
    with pytest.raises(ConfigError, match="starts verl 2 times, in lines 2, 2"):
        translate(script, [])


def test_a_function_that_is_never_called_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"starts no trainer of verl's; line 2 names one, .* that is not reached"):
        translate(written(tmp_path, f"run() {{\n{M} data.seed=1\n}}\n"), [])


def test_the_script_is_not_written_over(tmp_path: Path) -> None:
    script = written(tmp_path, M + "data.seed=1")
    with pytest.raises(ValueError, match=r"run\.sh: is the file that is translated"):
        CliRunner().invoke(app, ["config", "import-verl", str(script), "-o", str(script)], catch_exceptions=False)
    assert script.read_text() == M + "data.seed=1"


def test_words_that_are_no_settings_are_arguments_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "gpus=$1; name=${2:-none}; shift\npython3 -m verl.trainer.main_ppo data.train_files=a.parquet "
        'trainer.n_gpus_per_node=$gpus trainer.experiment_name=$name trainer.nnodes=$# "${@:2}"\n'
    )
    with pytest.raises(
        ConfigError, match=r"known only when it is run\. give it behind the script, or add trainer\.n_gpus"
    ):
        translate(script, [])
    for words in (["8", "tiny", "trainer.seed=3"], ["trainer.seed=3", "8", "tiny"]):
        tree = yaml.safe_load(translate(script, words)[0])
        assert tree["trainer"] == {"n_gpus_per_node": 8, "experiment_name": "tiny", "nnodes": 1, "seed": 3}
    assert yaml.safe_load(translate(script, ["8"])[0])["trainer"]["experiment_name"] == "none"
    script.write_text("bash -c 'python3 -m verl.trainer.main_ppo data.train_files=a.parquet trainer.nnodes=$1'\n")
    _, listing = translate(script, ["8"])  # a script of its own, which has no arguments
    assert "trainer.nnodes" in listing
