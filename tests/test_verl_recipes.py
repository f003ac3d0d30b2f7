"""recipes/verl: each is its script, key for key, but for what its header names; and each runs, made small."""

import math
import re
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from tests.config.scripts import SCRIPTS
from tests.installed import needs_megatron
from tests.runs.forked_group import ForkedGroup
from tests.runs.tiny_run import REWARD, rows, set_eos, train, write_jsonl
from tests.text.servers.bench import REAL, needs_vllm
from tests.text.servers.stand_in import environment
from tests.tiny import EOS_ID, MOE, save_tiny, save_tiny_reward_model
from tether.config import ConfigError, LoadedConfig, load_config
from tether.config.keys import values_of
from tether.config.support.live_keys import live_keys, why_idle
from tether.config.support.verl_keys import unread
from tether.distributed import groups
from tether.metrics.loggers.jsonl import read_metrics

FOLDER = Path(__file__).resolve().parent.parent / "recipes/verl"
ENGINE = "actor_rollout_ref.rollout.name"
CLASSES = {
    "gemma": "gemma2",
    "qwen1.5_moe": "qwen2_moe",
    "moonlight": "deepseek_v3",
    "qwen3": "qwen3",
    "qwen2": "qwen2",
}
QUICK = ("run_gemma", "run_moonlight16b_a3b_gsm8k_megatron")
"""A dense model by FSDP, and one with experts that its script trains by Megatron."""
PROMPT, RESPONSE = 64, 8


def recipe(name: str) -> Path:
    return FOLDER / f"{name}.yaml"


def class_of(name: str) -> str:
    """The tiny class of the family that a script trains."""
    return next((tiny for part, tiny in CLASSES.items() if part in name), "llama")


def key_of(setting: str) -> str:
    return setting.split("=")[0].lstrip("+")


def refused(settings: list[str]) -> set[str]:
    """The keys that keep these settings from being run."""
    try:
        load_config(None, settings)
    except ConfigError as error:
        return {problem.path for problem in error.problems}
    return set()


@cache
def left_out(name: str) -> list[str]:
    """Of a script's settings those that tether refuses, or does otherwise: native samples where it says vllm."""
    keys = refused(SCRIPTS[name])
    return [setting for setting in SCRIPTS[name] if key_of(setting) in keys or setting == f"{ENGINE}=vllm"]


def values(loaded: LoadedConfig) -> dict[str, object]:
    """The keys that act in a run."""
    found = values_of(loaded.config)
    return {key: found[key] for key in live_keys() if why_idle(key, found) is None}


def test_every_script_is_a_recipe() -> None:
    assert len(SCRIPTS) == 24
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(SCRIPTS)


def test_every_recipe_has_its_row() -> None:
    page = (FOLDER.parent.parent / "docs/evidence/seeds.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[`(.*)`\]\(../../recipes/verl/(.*).yaml\) \|(.*)$", page, re.MULTILINE)
    expected = []
    for name, script in SCRIPTS.items():
        settings = dict(setting.split("=", 1) for setting in script)
        nodes = "" if settings["trainer.nnodes"] == "1" else f" x {settings['trainer.nnodes']}"
        expected.append((name, name, settings["trainer.n_gpus_per_node"] + nodes, class_of(name)))
    found = [(name, file, *(cell.strip() for cell in row.split("|")[1:3])) for name, file, row in rows]
    assert sorted(found) == sorted(expected)


def test_every_recipe_is_its_script() -> None:
    different = {}
    for name, settings in SCRIPTS.items():
        missing = left_out(name)
        acting = [s for s in settings if s not in missing and unread(key_of(s)) is None]
        ours, theirs = values(load_config(recipe(name), [])), values(load_config(None, acting))
        if ours != theirs:
            different[name] = set(map(str, ours.items())) ^ set(map(str, theirs.items()))
    assert different == {}


def test_every_header_names_what_is_not_there() -> None:
    wrong = {}
    for name in SCRIPTS:
        text = recipe(name).read_text(encoding="utf-8")
        lines = re.findall(r"^# Not here \(README.md\): (.*)$", text, re.MULTILINE)
        patterns = [pattern for line in lines for pattern in line.split(", ")]
        missing = [setting.lstrip("+") for setting in left_out(name)]
        untold = [setting for setting in missing if not any(fnmatch(setting, pattern) for pattern in patterns)]
        idle = [pattern for pattern in patterns if not any(fnmatch(setting, pattern) for setting in missing)]
        if untold or idle:
            wrong[name] = untold, idle
    assert wrong == {}


def made_small(name: str, folder: Path) -> list[str]:
    """Overrides that keep a recipe's proportions: optimizer steps a batch, responses a prompt, rows a micro-batch."""
    config = load_config(recipe(name), []).config
    data, actor, found = config.data, config.actor_rollout_ref.actor, values_of(config)
    set_eos(save_tiny(folder / "model", class_of(name)), [EOS_ID, *range(4, 90)])
    if config.reward_model.enable:
        reward = {"reward_model.model.path": save_tiny_reward_model(folder / "rm")}
    else:
        reward = {"custom_reward_function.path": folder / "reward.py"}
        (folder / "reward.py").write_text(REWARD)
    mini = 2  # prompts
    steps = data.train_batch_size // actor.ppo_mini_batch_size
    row, long = PROMPT + RESPONSE, data.max_prompt_length + data.max_response_length
    live = [key for key in live_keys() if why_idle(key, found) is None]
    budgets = {key: max(found[key] * row // long, row) for key in live if key.endswith("max_token_len_per_gpu")}
    sizes = {key: max(found[key] * mini // actor.ppo_mini_batch_size, 1) for key in live if "micro_batch_size" in key}
    small = {
        **budgets,
        **sizes,
        **reward,
        "data.train_files": write_jsonl(folder / "train.jsonl", rows(count=mini * steps)),
        "data.val_files": write_jsonl(folder / "val.jsonl", rows(count=mini)),
        "data.train_batch_size": mini * steps,
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": RESPONSE,
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.actor.ppo_mini_batch_size": mini,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.rollout.dtype": "float32",
        "critic.model.fsdp_config.dtype": "float32",
        "actor_rollout_ref.actor.strategy": "fsdp",
        **{f"{role}.megatron.use_dist_checkpointing": False for role in ("actor_rollout_ref.actor", "critic")},
        "trainer.device": "cpu",
        "trainer.num_threads": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.logger": "file",
        "trainer.test_freq": min(config.trainer.test_freq, 1),
        "trainer.save_freq": min(config.trainer.save_freq, 2),
        "trainer.total_training_steps": 2,
        "trainer.profile_steps": "null",  # of steps that such a run does not have
        "trainer.default_local_dir": folder / "run",
    }
    return [f"{key}={value}" for key, value in small.items()]


def test_token_budgets_reach_the_critic_and_the_reference() -> None:
    config = load_config(recipe("run_qwen2-7b_seq_balance"), []).config
    assert config.critic.use_dynamic_bsz
    assert config.critic.forward_max_token_len_per_gpu == 98304
    assert config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz
    assert config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu == 24000


def check_run(name: str, small: list[str]) -> None:
    """Train, and see that all of it happened."""
    directory = train(small, recipe(name))
    metrics = read_metrics(directory)
    assert [step for step in metrics if step] == [1, 2]
    assert all(map(math.isfinite, (value for values in metrics.values() for value in values.values())))
    assert all(metrics[step][f"{role}/grad_norm"] > 0 for step in (1, 2) for role in ("actor", "critic"))
    assert any(key.startswith("val-") for key in metrics[2]) == ("trainer.test_freq=1" in small)
    saved = (directory / "global_step_2/actor").glob("model*.safetensors")  # several devices write a file each
    assert any(saved)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SCRIPTS])
def test_a_recipe_runs_made_small(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_SGLANG", str(environment(tmp_path / "env", kind="sglang")))
    check_run(name, made_small(name, tmp_path))


OF_VLLM = [name for name in SCRIPTS if f"{ENGINE}=vllm" in SCRIPTS[name] and class_of(name) not in MOE]
"""On a CPU vLLM refuses new weights of experts (docs/guides/servers.md)."""
OF_32 = {
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, "initializer_range": 0.05},  # 0.2: always the same token
    "qwen3": {"head_dim": 32},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "python"),
    [
        pytest.param("run_qwen2-7b_seq_balance", None, id="stand-in"),
        *(pytest.param(name, REAL, marks=needs_vllm, id=f"vllm-{name}") for name in OF_VLLM),
    ],
)
def test_a_recipe_is_sampled_by_vllm(
    name: str, python: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its script says, with heads of 32, the narrowest that vLLM takes on a CPU."""
    monkeypatch.setenv("TETHER_VLLM", str(python.parent.parent if python else environment(tmp_path)))
    small = made_small(name, tmp_path)
    heads = {"hidden_size": 128} | OF_32.get(class_of(name), {})
    set_eos(save_tiny(tmp_path / "model", class_of(name), **heads), [EOS_ID, *range(4, 90)])
    sizes = [f"actor_rollout_ref.rollout.{size}" for size in ("gpu_memory_utilization=0.1", "enforce_eager=True")]
    check_run(name, [*small, f"{ENGINE}=vllm", *sizes])


TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
EXPERTS = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
SMALL_LAYOUTS: dict[str, dict[str, object]] = {
    "run_deepseek_math_gsm8k_megatron": {TENSOR: 2, PIPELINE: 1},
    "run_qwen2-7b_math_gsm8k_megatron": {TENSOR: 1, PIPELINE: 2},
    "run_qwen1.5_moe_a2.7b-gsm8k_megatron": {TENSOR: 2, PIPELINE: 1, **EXPERTS},
    "run_moonlight16b_a3b_gsm8k_megatron": {
        TENSOR: 1,
        PIPELINE: 1,
        **EXPERTS,
        "override_transformer_config.num_layers_in_last_pipeline_stage": "null",
    },
}
"""Sizes for two devices; tests/runs/test_megatron.py has four."""


@pytest.mark.slow
@needs_megatron
@pytest.mark.parametrize("name", SMALL_LAYOUTS)
def test_a_recipe_runs_in_megatron(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    sizes = [f"actor_rollout_ref.actor.megatron.{key}={value}" for key, value in SMALL_LAYOUTS[name].items()]
    chosen = "actor_rollout_ref.actor.strategy=megatron"
    check_run(name, [*made_small(name, tmp_path), "trainer.n_gpus_per_node=2", chosen, *sizes])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run_gemma", "run_deepseek7b_llm_sp2"])
def test_a_recipe_runs_on_its_devices(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    check_run(name, [*made_small(name, tmp_path), "trainer.n_gpus_per_node=2"])
