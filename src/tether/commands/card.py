"""`tether card`: the model card of a trained policy, for model hubs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCardData

from tether import __version__
from tether.checkpoints import CARD, run_of, step_of
from tether.commands.policy import checkpoint_at
from tether.commands.result import HELD_OUT, run_scores
from tether.config import LoadedConfig, RunConfig, load_config, minimal_tree
from tether.metrics.loggers import METRICS_FILE, read_metrics, validation_means
from tether.text.models.model_path import KNOWN_MODELS

README, CURVE = CARD
MACHINE_KEYS = ("resume_mode", "resume_from_path", "default_local_dir", "device")
"""Keys of `trainer` that the card omits, because they depend on the machine and do not change the result."""
MAX_TABLE_ROWS = 12


def write_card(path: Path) -> Path:
    """Write README.md, and curve.png if matplotlib is installed, next to the weights of a checkpoint.

    Args:
        path: a ``global_step_N`` folder, or the folder of a run (its last checkpoint).

    Returns:
        Path of the README.

    Raises:
        ValueError: there is no checkpoint, it already has a README, or the folder cannot be written.
    """
    checkpoint = checkpoint_at(path)
    folder = checkpoint / "actor"
    if (folder / README).exists():
        raise ValueError(f"{folder / README}: exists already. Move it away to write another one")
    loaded = load_config(checkpoint / "run.yaml", [])
    steps = read_metrics(run_of(checkpoint)) if (run_of(checkpoint) / METRICS_FILE).is_file() else {}
    steps = {step: metrics for step, metrics in steps.items() if step <= step_of(checkpoint)}
    key, scores = run_scores(steps)
    try:
        drawn = bool(scores) and _draw(run_of(checkpoint), folder / CURVE, steps, key)
        (folder / README).write_text(_card(loaded, step_of(checkpoint), key, scores, drawn=drawn), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written ({error.strerror})") from error
    return folder / README


def _draw(run: Path, picture: Path, steps: Mapping[int, Mapping[str, float]], key: str) -> bool:
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from tether.metrics.plot import plot_run

    validated = sorted({name for metrics in steps.values() for name in validation_means(metrics)})
    plot_run([run], picture, validated if key == HELD_OUT else [key], title="Held-out score")
    return True


def _card(loaded: LoadedConfig, step: int, key: str, scores: Mapping[int, float], *, drawn: bool) -> str:
    config = loaded.config
    name = f"{config.trainer.project_name}-{config.trainer.experiment_name}"
    sections = [
        f"---\n{_front_matter(config, name, key, scores)}\n---",
        f"# {name}",
        f"{_base(config)}, trained with {_algorithm(config)} by tether {__version__}.",
        _facts(config, step, key, scores),
        *(["## Score", f"![{key} over the steps of the run]({CURVE})"] if drawn else []),
        *([_table(key, scores)] if scores else []),
        "## Use",
        _use(config),
        "## Reproduce",
        f"The settings that differ from tether's defaults:\n\n```yaml\n# run.yaml\n{_settings(loaded)}```",
        "```sh\ntether train run.yaml\n```",
        _versions(),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(config: RunConfig, name: str, key: str, scores: Mapping[int, float]) -> str:
    text, task = config.env.train.id is None, _task(config)
    method = ["sft"] if config.sft.enable else ["reinforcement-learning", config.algorithm.adv_estimator]
    results = [
        EvalResult(
            task_type="text-generation" if text else "reinforcement-learning",
            dataset_type=re.sub(r"[^\w./-]+", "-", task)[:96],
            dataset_name=task,
            metric_type=key.rsplit("/", 2)[-2] if key.startswith("val-core/") else "mean_reward",
            metric_name=key,
            metric_value=round(scores[max(scores)], 6),
        )
        for _ in scores
    ][:1]
    data = ModelCardData(
        model_name=name,
        library_name="transformers" if text else "tether",
        pipeline_tag="text-generation" if text else "reinforcement-learning",
        base_model=_hub_id(config),
        tags=["tether", *method],
        eval_results=results or None,
    )
    return data.to_yaml()


def _hub_id(config: RunConfig) -> str | None:
    """Return the id of the initial model on the Hugging Face hub; None if it is unknown."""
    path = config.actor_rollout_ref.model.path or ""
    if path in KNOWN_MODELS:
        return KNOWN_MODELS[path].hub_id
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) is not None
    return path if is_id and not Path(path).exists() else None


def _base(config: RunConfig) -> str:
    base = _hub_id(config) or config.actor_rollout_ref.model.path
    return f"`{base}`" if base else "A new network"


def _task(config: RunConfig) -> str:
    """Return the name of the environment or of the training files."""
    if config.env.train.id is not None:
        return config.env.train.id
    files = config.data.train_files
    return ", ".join(re.sub(r"\?.*", "", str(file)) for file in ([files] if isinstance(files, str) else files))


def _algorithm(config: RunConfig) -> str:
    if config.sft.enable:
        return "supervised fine-tuning"
    estimator, loss = config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode
    name = "PPO with a critic (gae)" if estimator == "gae" else estimator
    return name if loss == "vanilla" else f"{name}, policy loss {loss}"


def _facts(config: RunConfig, step: int, key: str, scores: Mapping[int, float]) -> str:
    rows = {"task": f"`{_task(config)}`", "training steps": str(step)}
    if config.env.train.id is None:
        rows |= {"a step": f"{config.data.train_batch_size} conversations"} if config.sft.enable else _rl_facts(config)
        if config.actor_rollout_ref.model.lora_rank:
            rows["adapter"] = f"LoRA of rank {config.actor_rollout_ref.model.lora_rank}, merged into the weights"
    rows["seed"] = f"{config.trainer.seed} (one run; a score of one seed varies)"
    if scores:
        first, last = min(scores), max(scores)
        rows[f"`{key}`"] = f"{scores[first]:.3f} at step {first}, {scores[last]:.3f} at step {last}"
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _rl_facts(config: RunConfig) -> dict[str, str]:
    n, reward = config.actor_rollout_ref.rollout.n, config.custom_reward_function
    own = f"`{Path(reward.path).name}:{reward.name}`" if reward.path else "tether's rule for the data source"
    return {"a step": f"{config.data.train_batch_size} prompts, {n} response{'s' * (n > 1)} each", "reward": own}


def _table(key: str, scores: Mapping[int, float]) -> str:
    steps = sorted(scores)
    stride = -(-len(steps) // MAX_TABLE_ROWS)
    shown = sorted({*steps[::stride], steps[-1]})
    return "\n".join([f"| step | `{key}` |", "|---|---|", *(f"| {step} | {scores[step]:.4g} |" for step in shown)])


def _use(config: RunConfig) -> str:
    if config.env.train.id is not None:
        return (
            "```python\nimport tether\n\n"
            'policy = tether.load("global_step_N")  # the folder that holds this one and run.yaml\n'
            "action = policy.predict(observation)\n```"
        )
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'folder = "."  # where this file is\n'
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n```\n\n"
        'or `tether generate . "your question"`.'
    )


def _settings(loaded: LoadedConfig) -> str:
    tree = minimal_tree(loaded)
    for key in MACHINE_KEYS:
        tree.get("trainer", {}).pop(key, None)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=110)


def _versions() -> str:
    packages = ("torch", "transformers", "numpy")
    listed = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return f"This page was written with tether {__version__}, {listed}, Python {platform.python_version()}."
