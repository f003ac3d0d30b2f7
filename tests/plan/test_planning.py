"""Plans of configurations: the verdict, the changes that make a run fit, bad input in one line."""

import json
from pathlib import Path

import pytest

from tether.commands.plan import PlanOptions, load_for, read_price, show_plan
from tether.config import LoadedConfig, load_config
from tether.plan.assumptions import NOTHING_GIVEN, Assumptions, lengths_of
from tether.plan.changes import largest_micro_batch, smallest_changes, what_if
from tether.plan.devices import DEVICES, Device
from tether.plan.memory import total
from tether.plan.planning import Planner

ROOT = Path(__file__).resolve().parent.parent.parent
GRPO = ("data.train_files=[gsm8k.parquet]", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8")


def load(words: list[str]) -> LoadedConfig:
    file, rest = (Path(words[0]), words[1:]) if words[0].endswith(".yaml") else (None, words)
    return load_config(file, rest)


def planner(
    model: str, device: Device, devices: int = 1, *more: str, assumptions: Assumptions = NOTHING_GIVEN
) -> Planner:
    words = [*GRPO, f"actor_rollout_ref.model.path={model}", f"trainer.n_gpus_per_node={devices}", *more]
    return Planner(load([*words, "trainer.device=cuda"]).config, device, assumptions)


def test_two_cards_of_24_gb() -> None:
    """0.5B trains with all weights, 1.5B on the brink, 7B by no means; what makes the middle one fit does."""
    card = DEVICES["generic-24g"]
    assert planner("qwen2.5-0.5b", card, 2).plan().verdict == "fits"
    middle = planner("qwen2.5-1.5b", card, 2)
    assert middle.plan().verdict == "try"
    assert planner("qwen2.5-7b", card, 2).plan().verdict == "does not fit"
    changes = smallest_changes(middle)
    assert changes
    assert all(change.plan.verdict == "fits" for change in changes)
    seconds = [change.plan.step.middle for change in changes]
    assert seconds == sorted(seconds)


def test_adapters_on_the_critic_save_memory_and_time_as_on_the_policy() -> None:
    card, gae = DEVICES["h100-80g"], ("algorithm.adv_estimator=gae", "actor_rollout_ref.model.lora_rank=16")
    whole, adapted = (planner("qwen2.5-1.5b", card, 1, *gae, *more) for more in ((), ("critic.model.lora_rank=16",)))
    of_critic, of_actor = adapted.models["critic"], adapted.models["actor"]
    assert of_critic.adapter == of_critic.learned == of_actor.learned < whole.models["critic"].learned / 50
    memory = [plan.plan().groups[0].phases["update_critic"]["critic gradients"] for plan in (whole, adapted)]
    assert memory[1] < memory[0] / 50
    assert adapted.plan().step.middle < whole.plan().step.middle


def test_the_largest_micro_batch_fits_and_one_more_row_does_not() -> None:
    results = planner("qwen2.5-1.5b", DEVICES["generic-24g"], 2)
    largest = largest_micro_batch(results)
    assert largest
    key, rows = largest

    def updates_within(rows: int) -> bool:
        plan = planner("qwen2.5-1.5b", DEVICES["generic-24g"], 2, f"{key}={rows}").plan()
        return total(plan.groups[0].phases["update_actor"]) <= 0.9 * plan.cluster.device.memory * 2**30

    assert updates_within(rows)
    assert not updates_within(rows + 1)


def test_more_devices_never_need_more_memory_each_or_more_time() -> None:
    plans = [planner("qwen2.5-7b", DEVICES["h100-80g"], count).plan() for count in (2, 4, 8)]
    assert [plan.peak for plan in plans] == sorted((plan.peak for plan in plans), reverse=True)
    assert [plan.step.middle for plan in plans] == sorted((plan.step.middle for plan in plans), reverse=True)


def test_a_run_in_turn_ahead_and_far_ahead() -> None:
    assumptions = Assumptions(mean=100, tail=500)
    cases = what_if(planner("qwen2.5-3b", DEVICES["h100-80g"], 4, assumptions=assumptions))["samplers"]
    split = {case.what: case for case in cases}
    ahead, far = split["2 sample, 2 learn, one step ahead"], split["2 sample, 2 learn, fully asynchronous"]
    assert far.step.middle <= ahead.step.middle < split["2 sample, 2 learn, in turn"].step.middle
    assert len(ahead.plan.groups) == 2, "samplers and learners keep different things"


@pytest.mark.parametrize(
    ("assumptions", "message"),
    [
        (Assumptions(mean=400, tail=300), "--response-mean 400: is above --response-tail=300"),
        (Assumptions(tail=600), "--response-tail 600: is above data.max_response_length=512"),
        (Assumptions(prompt=513), "--prompt-mean 513: is above data.max_prompt_length=512"),
        (Assumptions(mean=0), "--response-mean 0: is not a number of tokens above 0"),
    ],
)
def test_lengths_that_contradict_are_one_line(assumptions: Assumptions, message: str) -> None:
    config = load([*GRPO, "actor_rollout_ref.model.path=qwen2.5-0.5b"]).config
    with pytest.raises(ValueError, match=f"^{message}$"):
        lengths_of(config, assumptions)


def test_a_price_has_a_currency() -> None:
    assert read_price("2.5EUR") == (2.5, "EUR")
    assert read_price("$3") == (3.0, "$")
    with pytest.raises(ValueError, match=r"^--price 2\.5: names no currency\. Write .*2\.5EUR$"):
        read_price("2.5")


def test_a_layout_that_cannot_be_is_refused_in_the_words_of_the_check() -> None:
    megatron = "actor_rollout_ref.actor.strategy=megatron"
    size = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
    with pytest.raises(ValueError, match=f"^{size}: tensor 3 x pipeline 1 .* = 3 does not divide the 8 devices"):
        planner("qwen2.5-7b", DEVICES["h100-80g"], 8, megatron, f"{size}=3")
    with pytest.raises(ValueError, match=f"^{size}=8 cannot split 28 attention heads"):
        planner("qwen2.5-7b", DEVICES["h100-80g"], 8, megatron, f"{size}=8").plan()


def test_the_command_reads_scripts_of_verl_and_exits_with_1_where_it_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = str(ROOT / "recipes/verl/run_qwen2.5-32b.yaml")
    assert show_plan([recipe], PlanOptions("a100-40g:8", 4, as_json=True), load) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["verdict"], data["devices"], data["device"]) == ("does not fit", 32, "a100-40g")
    needs = [sum(components.values()) for group in data["memory"] for components in group["phases"].values()]
    assert data["peak_bytes"] == pytest.approx(max(needs), rel=1e-6)
    assert data["steps"] == 15 * ((7473 + 7500) // 1024)
    loaded, device = load_for([recipe], PlanOptions("a100-40g:8", 4), load)
    assert (loaded.config.trainer.nnodes, device.name) == (4, "a100-40g")


def test_a_run_in_a_simulator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^env\.train\.id=CartPole-v1: runs in simulators are not planned"):
        show_plan(["env.train.id=CartPole-v1", "policy.model_type=cnn_policy"], PlanOptions("h100-80g:1"), load)
