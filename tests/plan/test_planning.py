"""Plans of configurations: the verdict, the changes that make a run fit, bad input in one line."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest

from tether.commands.plan import Check, PlanOptions, load_for, read_price, show_plan
from tether.config import LoadedConfig, load_config
from tether.plan.architecture import KNOWN
from tether.plan.assumptions import (
    DEFAULT_ASSUMPTIONS,
    Assumptions,
    assumed_lengths,
    training_row_count,
    validation_rows,
)
from tether.plan.changes import largest_micro_batch, smallest_changes, what_if
from tether.plan.devices import DEVICES, GIB, Device
from tether.plan.memory import total
from tether.plan.planning import HOST_PROCESS, Planner
from tether.plan.report import memory_table, verdict

ROOT = Path(__file__).resolve().parent.parent.parent
GRPO = ("data.train_files=[gsm8k.parquet]", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8")


def load(words: Sequence[str], check: Check = lambda config: []) -> LoadedConfig:
    file, rest = (Path(words[0]), words[1:]) if words[0].endswith(".yaml") else (None, words)
    return load_config(file, rest, check)


def planner(
    model: str, device: Device, devices: int = 1, *more: str, assumptions: Assumptions = DEFAULT_ASSUMPTIONS
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
    assert (
        of_critic.adapter
        == of_critic.trained_weights
        == of_actor.trained_weights
        < whole.models["critic"].trained_weights / 50
    )
    memory = [plan.plan().groups[0].phases["update_critic"]["critic gradients"] for plan in (whole, adapted)]
    assert memory[1] < memory[0] / 50
    assert adapted.plan().step.middle < whole.plan().step.middle


def test_a_critic_of_fewer_layers_is_planned_as_such() -> None:
    gae = "algorithm.adv_estimator=gae"
    few = planner("qwen2.5-1.5b", DEVICES["h100-80g"], 1, gae, "critic.model.override_config={num_hidden_layers: 7}")
    whole = planner("qwen2.5-1.5b", DEVICES["h100-80g"], 1, gae)
    assert few.models["critic"].sizes.layers == 7
    assert few.models["actor"].sizes == whole.models["actor"].sizes
    assert few.plan().step.middle < whole.plan().step.middle


def test_a_teacher_is_planned_as_a_reference_of_its_own_size() -> None:
    card, adapted = DEVICES["h100-80g"], "actor_rollout_ref.model.lora_rank=16"
    teacher = ("distillation.enabled=True", "distillation.teacher_models.teacher_model.model_path=qwen2.5-7b")
    alone, taught = (planner("qwen2.5-1.5b", card, 2, adapted, *more) for more in ((), teacher))
    assert "reference" not in alone.models
    assert taught.models["reference"].sizes.parameters == KNOWN["qwen2.5-7b"].parameters
    assert taught.plan().step.middle > alone.plan().step.middle


def test_each_of_several_teachers_is_planned() -> None:
    """Both rest on the device; each scores half of the rows, one after the other."""
    card, one = (
        DEVICES["h100-80g"],
        ("distillation.enabled=True", "distillation.teacher_models.a.model_path=qwen2.5-7b"),
    )
    two = (*one, "distillation.teacher_models={a: {key: x}, b: {key: y, model_path: qwen2.5-1.5b}}")
    single, several = (planner("qwen2.5-1.5b", card, 2, *more) for more in (one, two))
    sizes = [several.models[name].sizes.parameters for name in several.references]
    assert sizes == [KNOWN["qwen2.5-7b"].parameters, KNOWN["qwen2.5-1.5b"].parameters]
    phases = [plan.plan().groups[0].phases["update_actor"] for plan in (single, several)]
    assert phases[1]["teacher a weights"] == phases[0]["reference weights"]
    assert phases[1]["teacher b weights"] == several.models["teacher b"].total_weights * 2 / 2
    assert several.plan().times["ref"].middle < single.plan().times["ref"].middle
    whole = planner("qwen2.5-1.5b", card, 2, *one, "distillation.distillation_loss.loss_mode=full")
    assert whole.plan().groups[0].phases["update_actor"]["reference weights"] > 0


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
    large = planner("qwen2.5-0.5b", DEVICES["h200-141g"], 2, "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    assert largest_micro_batch(large) == (key, 4 * 8 // 2), "at most what a device has of a mini-batch"


def test_a_server_whose_share_is_less_than_its_weights_does_not_fit() -> None:
    words = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.lora_rank=32")
    results = planner("qwen2.5-7b", DEVICES["rtx4090-24g"], 2, *words)
    plan = results.plan()
    assert plan.verdict == "does not fit"
    assert verdict(plan).startswith("does not fit: the server's 11.8 GiB are less than its weights (14.2 GiB)")
    changes = smallest_changes(results)
    assert changes
    for change in changes:
        assert change.plan.verdict == "fits"
        assert change.plan.server
        assert change.plan.server.problem is None
        assert {key.rpartition(".")[2] for key in change.values} & {
            "gpu_memory_utilization",
            "tensor_model_parallel_size",
        }


def test_a_server_with_a_small_share_samples_fewer_sequences_at_a_time() -> None:
    seconds = []
    for share in (0.3, 0.5, 0.9):
        words = ("actor_rollout_ref.rollout.name=vllm", f"actor_rollout_ref.rollout.gpu_memory_utilization={share}")
        seconds.append(planner("qwen3-1.7b", DEVICES["rtx4090-24g"], 2, *words).plan().times["gen"].middle)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 1.5 * seconds[-1]


def test_a_host_that_is_too_small_never_fits() -> None:
    """Weights, moments and the gradients of the model that is updated: 16 bytes a weight."""
    policy = "actor_rollout_ref.actor.fsdp_config.offload_policy=True"
    results = planner("qwen2.5-3b", DEVICES["rtx4090-24g"], 2, policy)
    plan = results.plan()
    assert plan.verdict == "fits"
    assert total(plan.host) == pytest.approx(16 * KNOWN["qwen2.5-3b"].parameters + 2 * HOST_PROCESS)
    small = replace(results, host_memory=32.0)
    assert small.plan().verdict == "does not fit"
    assert verdict(small.plan()).startswith("does not fit: a machine needs 51.0 GiB of host memory and has 32.0 GiB")
    assert all(total(change.plan.host) <= 32 * GIB for change in smallest_changes(small))


def test_micro_batches_are_counted_in_rows_or_tokens() -> None:
    """Gradients are summed over the cards in each micro-batch, so half as many rows in one cost more time."""
    key, card = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", DEVICES["rtx4090-24g"]
    seconds = [
        planner("qwen2.5-3b", card, 2, f"{key}={rows}").plan().times["update_actor"].middle for rows in (4, 2, 1)
    ]
    sent = 4096 * (2 * 2 + 4) * KNOWN["qwen2.5-3b"].parameters / 2 / 10e9  # 1,024 prompts x 8 on two cards
    assert seconds[2] - seconds[1] == pytest.approx(sent / 2, rel=0.03)
    assert seconds[1] - seconds[0] == pytest.approx(sent / 4, rel=0.03)


def test_the_search_combines_adapters_servers_and_offloading() -> None:
    card = DEVICES["rtx4090-24g"]

    def found(model: str, *more: str) -> dict[frozenset[str], float]:
        changes = smallest_changes(planner(model, card, 2, *more))
        names = [frozenset(key.rpartition(".")[2] for key in change.values) for change in changes]
        return {name: change.plan.step.middle for name, change in zip(names, changes, strict=True)}

    large = found("qwen2.5-3b")
    assert large[frozenset({"lora_rank", "max_num_seqs"})] < large[frozenset({"offload_policy"})]
    middle = found("qwen3-1.7b")
    assert frozenset({"name", "gpu_memory_utilization"}) in middle
    critic = found("qwen2.5-1.5b", "algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=1")
    assert any("lora_rank" in names for names in critic)
    assert any(names & {"optimizer_offload", "offload_policy"} for names in critic)


@pytest.mark.parametrize(
    ("share", "text", "code"),
    [
        (0.8, "fits: ", 0),
        (0.96, "fits by 4%, within the error of this estimate (10%), so try it: ", 0),
        (1.05, "does not fit by 5%, within the error of this estimate (10%), so try it: ", 1),
        (1.2, "does not fit: ", 1),
    ],
)
def test_verdicts_near_the_limit_say_in_which_direction(
    share: float, text: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*GRPO, "actor_rollout_ref.model.path=qwen2.5-0.5b"]
    peak = planner("qwen2.5-0.5b", DEVICES["h100-80g"]).plan().peak / GIB
    device = f"memory={peak / share},teraflops=989,bandwidth=3350"
    assert show_plan(words, PlanOptions(f"{device}:1", brief=True), load) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("qwen2.5-0.5b (sizes of qwen2.5-0.5b): 0.49B weights")
    assert lines[1].startswith(text)
    steps = "240 steps (7,473 rows, as GSM8K has; 30 epochs, the default): "
    assert any(line.startswith(steps) for line in lines)
    assert any("largest micro-batch that fits for the update" in line for line in lines) == (share < 0.9)


def test_tables_leave_nothing_out_and_keep_within_120_columns(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planner("qwen2.5-3b", DEVICES["rtx4090-24g"], 2).plan()
    for _, size, parts in memory_table(plan)[1]:
        numbers = [float(part.rpartition(" ")[2]) for part in parts.split(", ")]
        assert sum(numbers) == pytest.approx(float(size.split()[0]), abs=0.06 * len(numbers))
    words = [*GRPO, "actor_rollout_ref.model.path=qwen2.5-3b"]
    show_plan(words, PlanOptions("rtx4090-24g:2"), load)
    tables = capsys.readouterr().out.partition("\nmemory\n")[2]
    assert max(len(line.rstrip()) for line in tables.splitlines()) <= 120


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
        (Assumptions(prompt=float("nan")), "--prompt-mean nan: is not a number of tokens above 0"),
        (Assumptions(reward=float("inf")), "--reward-seconds inf: is not a number of seconds"),
    ],
)
def test_lengths_that_contradict_are_one_line(assumptions: Assumptions, message: str) -> None:
    config = load([*GRPO, "actor_rollout_ref.model.path=qwen2.5-0.5b"]).config
    with pytest.raises(ValueError, match=f"^{message}$"):
        assumed_lengths(config, assumptions)


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


def test_adapters_with_megatron_are_counted_for_dense_models_and_refused_for_others() -> None:
    megatron, card = "actor_rollout_ref.actor.strategy=megatron", DEVICES["h100-80g"]
    size = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    rank = "actor_rollout_ref.model.lora_rank=16"
    whole, adapted = (planner("qwen2.5-7b", card, 2, megatron, size, *more).plan() for more in ((), (rank,)))
    peaks = [max(sum(parts.values()) for parts in one.groups[0].phases.values()) for one in (whole, adapted)]
    assert peaks[1] < 0.6 * peaks[0]
    with pytest.raises(ValueError, match=f"^{rank}: Megatron trains adapters of dense models only"):
        planner("qwen3-30b-a3b", card, 8, megatron, rank).plan()


def test_the_command_reads_scripts_of_verl_and_exits_with_1_where_it_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = str(ROOT / "recipes/verl/run_qwen2.5-32b.yaml")
    assert show_plan([recipe], PlanOptions("a100-40g:8", 4, as_json=True), load) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["verdict"], data["devices"], data["device"]) == ("does not fit", 32, "a100-40g")
    needs = [sum(components.values()) for group in data["memory"] for components in group["phases"].values()]
    assert data["peak_bytes"] == pytest.approx(max(needs), rel=1e-6)
    assert data["steps"] == 15 * ceil((7473 + 7500) / 1024)
    trainer = load_for([recipe], PlanOptions("a100-40g:8", 4), load).config.trainer
    assert (trainer.nnodes, trainer.n_gpus_per_node, trainer.device) == (4, 8, "cuda")


@pytest.mark.parametrize("model_type", ["mlp_policy", "cnn_policy"])
def test_a_run_in_a_simulator_is_not_planned_for_another_machine(model_type: str) -> None:
    words = ["env.train.id=CartPole-v1", f"policy.model_type={model_type}"]
    with pytest.raises(ValueError, match=r"^--device h100-80g:1: a run in a simulator \(env.train.id=CartPole-v1\) is"):
        show_plan(words, PlanOptions("h100-80g:1"), load)
    with pytest.raises(ValueError, match=r"^--nodes 2: a run in a simulator"):
        show_plan(words, PlanOptions(nodes=2), load)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["data.train_files=[a.jsonl]", "actor_rollout_ref.rollout.m=8"], PlanOptions("h100-80g:8")),
        (["env.train.id=CartPole-v1"], PlanOptions(nodes=2)),
    ],
)
def test_a_configuration_is_loaded_once_also_where_it_is_refused(words: list[str], options: PlanOptions) -> None:
    loads = list[Sequence[str]]()

    def counting(words: Sequence[str], check: Check) -> LoadedConfig:
        loads.append(words)
        return load(words, check)

    with pytest.raises(ValueError, match=r"rollout\.m|--nodes"):
        show_plan(words, options, counting)
    assert len(loads) == 1


def test_the_native_sampler_keeps_a_merged_copy_of_adapted_layers() -> None:
    """On a CPU it also keeps all matrices in the order of its kernels."""
    sizes, lora, name = KNOWN["qwen2.5-0.5b"], "actor_rollout_ref.model.lora_rank=16", "layers with merged adapters"
    for device in (DEVICES["h100-80g"], Device("a machine", 16, 0.4, 50, 12, is_cpu=True)):
        adapted = planner("qwen2.5-0.5b", device, 1, lora).plan().groups[0].phases
        assert all(parts[name] == 2 * sizes.in_layers for parts in adapted.values())
        assert adapted["checkpoint"][f"{name} in float32"] == 4 * sizes.in_layers
        assert adapted["checkpoint"]["frozen weights in float32"] == 4 * sizes.parameters
        plain = planner("qwen2.5-0.5b", device).plan().groups[0].phases
        assert name not in plain["sampling"]
        copied = plain["sampling"].get("weights in the order of the kernels")
        assert copied == (2 * (sizes.in_layers + sizes.embedding) if device.is_cpu else None)
    served = planner("qwen2.5-0.5b", DEVICES["h100-80g"], 1, lora, "actor_rollout_ref.rollout.name=vllm").plan()
    assert not any(name in parts for parts in served.groups[0].phases.values())


def test_validation_may_sample_more_rows_than_a_step(tmp_path: Path) -> None:
    """4 x 8 rows are sampled in a step, and 100 in a validation, whose file has so many lines."""
    (tmp_path / "test.jsonl").write_text("{}\n" * 100)
    words = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    held_out = (*words, f"data.val_files=[{tmp_path / 'test.jsonl'}]")
    card = DEVICES["h100-80g"]
    phases = planner("qwen2.5-0.5b", card, 1, *held_out).plan().groups[0].phases
    caches = [phases[phase]["KV cache"] for phase in ("validation", "sampling")]
    assert caches[0] / caches[1] == pytest.approx(100 / 32)
    assert "validation" not in planner("qwen2.5-0.5b", card, 1, *words).plan().groups[0].phases
    never = planner("qwen2.5-0.5b", card, 1, *held_out, "trainer.val_before_train=False").plan()
    assert "validation" not in never.groups[0].phases


def test_a_run_that_takes_the_samplers_log_probs_computes_none() -> None:
    minis, card = "actor_rollout_ref.actor.ppo_mini_batch_size=256", DEVICES["h100-80g"]
    bypass = "algorithm.rollout_correction.bypass_mode=True"
    assert "old_log_prob" in planner("qwen2.5-0.5b", card, 1, minis).plan().times
    plan = planner("qwen2.5-0.5b", card, 1, minis, bypass).plan()
    assert "old_log_prob" not in plan.times
    assert "log_probs" not in plan.groups[0].phases


def test_a_micro_batch_is_no_larger_than_the_rows_that_a_device_has() -> None:
    """Four prompts of up to 512 tokens with 8 responses of up to 16 are 2,560 tokens, whatever the limit."""
    words = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.max_response_length=16")
    words += ("actor_rollout_ref.actor.use_dynamic_bsz=True",)
    key, card = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", DEVICES["h100-80g"]
    needs = [
        total(planner("qwen2.5-0.5b", card, 1, *words, f"{key}={tokens}").plan().groups[0].phases["update_actor"])
        for tokens in (1280, 2560, 16384)
    ]
    assert needs[0] < needs[1] == needs[2]


def test_changes_adapt_both_models_and_name_each_set_of_settings_once() -> None:
    changes = smallest_changes(planner("qwen3-1.7b", DEVICES["rtx4090-24g"], 2, "algorithm.adv_estimator=gae"))
    names = [frozenset(change.values) for change in changes]
    assert len(names) == len(set(names))
    assert any({"actor_rollout_ref.model.lora_rank", "critic.model.lora_rank"} <= keys for keys in names)


def test_a_mixture_that_two_cards_cannot_train_is_told_how_many_can(capsys: pytest.CaptureFixture[str]) -> None:
    """Half of its 30.5 billion weights in bfloat16 are more than a card has, a quarter is not."""
    words = [*GRPO, "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B"]
    assert show_plan(words, PlanOptions("rtx4090-24g:2", brief=True), load) == 1
    printed = capsys.readouterr().out
    assert "no setting makes it fit: take more devices" in printed
    last = printed.partition("it fits on 4 of them with\n")[2]
    assert "actor_rollout_ref.rollout.tensor_model_parallel_size=4" in last


def test_rows_of_published_data_are_known_for_training_and_validation() -> None:
    words = ["data.train_files=[none/gsm8k/train.parquet,none/math/train.parquet]"]
    words += ["data.val_files=[none/gsm8k/test.parquet]", "actor_rollout_ref.model.path=qwen2.5-0.5b"]
    counts = [
        (training_row_count(config, DEFAULT_ASSUMPTIONS), validation_rows(config))
        for config in (load([*words, *more]).config for more in ((), ("data.val_max_samples=100",)))
    ]
    assert [(train and train.count, test and test.count) for train, test in counts] == [(14973, 1319), (14973, 100)]
    assert validation_rows(load([*words[:1], words[2], "data.val_files=[mine.parquet]"]).config) is None
