"""The plan of `tether sft`: an update on conversations, with nothing that samples or scores."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tether.commands.plan import Check, PlanOptions, show_plan
from tether.commands.train import memory_warning
from tether.config import LoadedConfig, load_config
from tether.plan.assumptions import DEFAULT_ASSUMPTIONS, Assumptions, assumed_lengths
from tether.plan.changes import largest_micro_batch, smallest_changes, what_if
from tether.plan.comparison import compare
from tether.plan.devices import DEVICES, Device
from tether.plan.memory import total, update
from tether.plan.planning import Planner

WORDS = [
    "sft.enable=True",
    "model.path=qwen2.5-0.5b",
    "data.train_files=[chats.jsonl]",
    "data.val_files=[held_out.jsonl]",
    "data.max_length=2048",
    "data.micro_batch_size_per_gpu=2",
]


def load(words: Sequence[str], check: Check = lambda config: []) -> LoadedConfig:
    return load_config(None, list(words), check)


def planner(*more: str, device: str = "rtx4090-24g", assumptions: Assumptions = DEFAULT_ASSUMPTIONS) -> Planner:
    return Planner(load([*WORDS, *more]).config, DEVICES[device], assumptions)


def test_only_the_update_takes_memory_and_time() -> None:
    """256 conversations a step, two of up to 2,048 tokens in a micro-batch; 1,000 rows are four steps an epoch."""
    of_run = planner("trainer.total_epochs=3", assumptions=Assumptions(rows=1000))
    plan = of_run.plan()
    [group] = plan.groups
    assert set(group.phases) == {"load", "update_actor", "validation", "checkpoint"}
    assert set(of_run.models) == {"actor"}
    needed = total(update(of_run.models["actor"], 2 * 2048))
    process = group.phases["load"]["process"]
    idle_memory = 14 * plan.actor.parameters  # bfloat16 weights, float32 masters, two moments
    assert total(group.phases["update_actor"]) == pytest.approx(process + idle_memory + 1.05 * needed)
    assert set(plan.times) == {"update_actor"}
    assert plan.step == plan.times["update_actor"]
    assert plan.idle is None
    assert plan.tokens == 256 * 1024
    assert plan.steps == 3 * 4


def test_a_step_is_one_mini_batch_whatever_the_keys_of_ppo_say() -> None:
    unread = ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.ppo_epochs=4")
    unread += ("actor_rollout_ref.actor.ppo_mini_batch_size=16",)
    assert planner(*unread).plan() == planner().plan()


def test_changes_and_tables_name_keys_that_fine_tuning_reads(capsys: pytest.CaptureFixture[str]) -> None:
    large = planner("model.path=qwen2.5-3b", device="generic-40g")
    changes = smallest_changes(large)
    assert changes
    assert not any("rollout." in key or "critic" in key or ".ref." in key for c in changes for key in c.values)
    assert set(what_if(planner())) == {"devices", "micro-batch"}
    words = [*WORDS, "model.path=qwen2.5-0.5b"]
    assert show_plan(words, PlanOptions("rtx4090-24g:1"), load) == 0
    assert "samplers idle" not in capsys.readouterr().out
    assert show_plan(words, PlanOptions("rtx4090-24g:1", as_json=True), load) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["samplers_idle"], list(data["seconds"])) == (None, ["update_actor", "step"])


def test_the_largest_pack_fits_and_the_next_larger_one_does_not() -> None:
    words = ["actor_rollout_ref.actor.use_dynamic_bsz=True", "model.path=qwen2.5-1.5b", "model.lora_rank=16"]
    results = largest_micro_batch(planner(*words))
    assert results
    key, tokens = results
    assert key == "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    verdicts = [planner(*words, f"{key}={size}").plan().verdict for size in (tokens, tokens + tokens // 20)]
    assert verdicts == ["fits", "try"]


def test_lengths_of_conversations() -> None:
    config = load(WORDS).config
    lengths = assumed_lengths(config, Assumptions(prompt=1000, mean=300))
    assert (lengths.prompt, lengths.mean, lengths.tail, lengths.limit) == (1000, 300, 1048, 1048)
    with pytest.raises(ValueError, match=r"^--response-tail 1500: is above the 1048 tokens that data\.max_length"):
        assumed_lengths(config, Assumptions(prompt=1000, tail=1500))


def test_a_run_is_compared_and_warned_of(tmp_path: Path) -> None:
    """Of 8 conversations with 4,000 tokens in all, 1,200 are learned."""
    loaded = load([*WORDS, "data.train_batch_size=8"])
    (tmp_path / "run.yaml").write_text(loaded.to_yaml())
    line = {"step": 1, "timing_s/update_actor": 3.0, "perf/total_num_tokens": 4000.0, "train/learned_tokens": 1200.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    device = Device("a machine", 16, 0.4, 50, 12, is_cpu=True)
    results = compare(tmp_path, device, {})
    planned = Planner(loaded.config, device, Assumptions(prompt=350, mean=150)).plan()
    assert results.seconds["update_actor"] == (planned.times["update_actor"], 3.0)
    assert memory_warning(load([*WORDS, "model.path=qwen2.5-72b"]).config)
