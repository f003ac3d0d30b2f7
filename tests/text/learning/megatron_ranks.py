"""The part of each rank of a layout in test_megatron.py: update a tiny model as one process does."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.ranks import of_first
from tests.text.learning.batches import ROWS, make_batch, make_critic, make_engine, make_policy, same_bits, weights
from tests.text.learning.batches import gradients as local_gradients
from tests.text.learning.fsdp_ranks import OPTIONS, costs
from tests.text.learning.replayed import REPLAYING, any_experts
from tests.text.learning.test_fsdp import (
    BAD_ROW,
    FOUR_ROWS,
    LOSS,
    ONE_ROW,
    PLAN,
    SELECTING,
    TOKENS,
    VALUES,
    adapted,
    distance,
    same_state,
    save_adapted,
    saved_state,
)
from tests.tiny import tiny_model
from tether.batch import TrainBatch
from tether.checkpoints import save_state
from tether.integrations.megatron import MegatronLayout
from tether.integrations.megatron.engine import MegatronEngine, MegatronOptions
from tether.integrations.megatron.shards import main_grad
from tether.loop.engine import LossSpec, UpdatePlan, UpdateResult
from tether.loop.incident import replay
from tether.text.learning.engines.copies import empty_copy
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.losses import PolicyForward, ValueForward
from tether.text.learning.packing import Assign, MicroBatching, MiniBatch, balanced, divide, mini_batches, token_rows
from tether.text.models.empty import empty_model
from tether.text.models.layers import use_tether_attention
from tether.text.models.output import hidden_states
from tether.text.models.save import write_model

Make = Callable[[], PreTrainedModel]
MEMORY = ("offload_weights", "offload_gradients", "offload_optimizer")


def policy_of(layout: MegatronLayout, **options: Any) -> PreTrainedModel:
    """A policy with a layer for each piece of a layout."""
    return make_policy(**depth(layout), **options)


def critic_of(layout: MegatronLayout) -> PreTrainedModel:
    """The same with a critic."""
    return make_critic(**depth(layout))


def depth(layout: MegatronLayout) -> dict[str, int]:
    """Layers, where a tiny model has too few."""
    return {"num_hidden_layers": layout.pipeline * layout.virtual_pipeline} if layout.virtual_pipeline else {}


def make_mixture(name: str = "qwen2_moe") -> PreTrainedModel:
    """A policy whose layers have experts, and one that all tokens share."""
    model = tiny_model(name, dtype=torch.float64)
    use_tether_attention(model)
    return model


def make_megatron(
    model: PreTrainedModel, micro: MicroBatching, layout: MegatronLayout, **rest: Any
) -> MegatronEngine[Any]:
    """An engine with the weights of a whole model, which is a policy where it has an output head."""
    role = "policy" if model.get_output_embeddings() is not None else "critic"
    names = [field.name for field in dataclasses.fields(MegatronOptions)]
    options = {name: rest.pop(name) for name in names if name in rest}
    empty, state = empty_model("", model.config, critic=role == "critic"), dict(model.state_dict())
    if hasattr(model, "peft_config"):
        empty = empty_copy(model)
        rest["adapter"] = {name: state.pop(name) for name, p in model.named_parameters() if p.requires_grad}
        state = {name.replace(".base_layer.", "."): value for name, value in state.items()}
    return MegatronEngine(
        empty,
        micro,
        rest.pop("optimizer", OPTIONS),
        weights=state,
        device=torch.device("cpu"),
        role=role,
        options=MegatronOptions(layout, **options),
        compute_dtype=rest.pop("compute_dtype", model.dtype),
        **rest,
    )


def share(
    engine: MegatronEngine[Any], batch: TrainBatch, minis: list[MiniBatch], assign: Assign = balanced
) -> tuple[Tensor, list[MiniBatch]]:
    """The rows of this rank's replica, and its part of each mini-batch."""
    return divide(minis, costs(batch), len(engine.output_ranks), assign)[engine.place()[0]]


def learn(
    engine: MegatronEngine[Any], batch: TrainBatch, loss: LossSpec, plan: UpdatePlan, step: int = 0
) -> UpdateResult:
    """An update of which each replica gets its rows only."""
    rows, parts = share(engine, batch, mini_batches(batch.response_mask, plan, step))
    return engine.learn(batch[rows], loss, plan, parts, step)


def whole_gradients(
    engine: MegatronEngine[Any], batch: TrainBatch, loss: LossSpec, assign: Assign = balanced
) -> dict[str, Tensor]:
    """The gradient of the loss of all rows as one mini-batch, by the names of transformers."""
    minis = mini_batches(batch.response_mask, UpdatePlan(mini_batch_rows=len(batch)), 0)
    rows, (part,) = share(engine, batch, minis, assign)
    engine.accumulate_gradients(batch[rows][part.rows], loss, part.sizes)
    with engine.shards.holding([main_grad(shard.parameter) for shard in engine.shards]):
        return whole_weights(engine)


def whole_weights(engine: MegatronEngine[Any]) -> dict[str, Tensor]:
    """As exported, on each rank."""
    return {name: tensor.clone() for name, tensor in engine.export().tensors}


def gradients(estimator: str, layout: MegatronLayout, make: Make | None = None) -> Iterator[tuple[str, float]]:
    """How far gradients of a policy are from one process's, for several ways to cut the rows."""
    make = make or partial(policy_of, layout)
    batch = make_batch(make(), critic_of(layout), estimator)
    engine = make_engine(make())
    engine.accumulate_gradients(batch, LOSS)
    expected = local_gradients(engine.model)
    for micro in (ONE_ROW, FOUR_ROWS, TOKENS):
        yield (
            f"{estimator}, {micro}",
            distance(whole_gradients(make_megatron(make(), micro, layout), batch, LOSS), expected),
        )
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    engine = make_megatron(make(), TOKENS, layout, overrides=recomputed)
    yield f"{estimator}, recomputed", distance(whole_gradients(engine, batch, LOSS), expected)


def critic_gradients(layout: MegatronLayout) -> Iterator[tuple[str, float]]:
    """The same of a critic."""
    batch = make_batch(policy_of(layout), critic_of(layout))
    engine = make_engine(critic_of(layout))
    engine.accumulate_gradients(batch, VALUES)
    megatron = make_megatron(critic_of(layout), FOUR_ROWS, layout)
    yield "critic", distance(whole_gradients(megatron, batch, VALUES), local_gradients(engine.model))


def averaged_gradients(layout: MegatronLayout) -> float:
    """The negative control: denominators of the rows of a replica."""
    batch = make_batch(policy_of(layout), critic_of(layout))
    engine = make_engine(policy_of(layout))
    engine.accumulate_gradients(batch, LOSS)
    megatron = make_megatron(policy_of(layout), FOUR_ROWS, layout)
    rows, _ = share(megatron, batch, mini_batches(batch.response_mask, UpdatePlan(ROWS), 0))
    megatron.accumulate_gradients(batch[rows[: len(rows) // 2 + 1]], LOSS)
    with megatron.shards.holding([main_grad(shard.parameter) for shard in megatron.shards]):
        return distance(whole_weights(megatron), local_gradients(engine.model))


def inferred(layout: MegatronLayout) -> dict[str, float]:
    """How far outputs of this replica's rows are from those of one process, at the worst token; of a speaker."""
    policy, critic = policy_of(layout), critic_of(layout)
    batch = make_batch(policy, critic)
    whole = PolicyForward(temperature=0.7, with_entropy=True, with_sum_pi_squared=True)
    far = {}
    for model, forward in ((policy, whole), (critic, ValueForward(with_bootstrap=True))):
        with torch.no_grad():
            expected = forward(model, batch)
        engine = make_megatron(model, FOUR_ROWS, layout, optimizer=None)
        rows, _ = share(engine, batch, mini_batches(batch.response_mask, UpdatePlan(ROWS), 0))
        found = engine.infer(batch[rows], forward)
        assert (found is not None) == engine.place()[1] or dist.get_world_size() > len(engine.output_ranks)
        for field in dataclasses.fields(expected):
            value = getattr(expected, field.name)
            if value is not None and found is not None:
                assert value.abs().sum() > 0
                far[field.name] = float((getattr(found, field.name) - value[rows]).abs().max())
    return far


def updates(
    loss: LossSpec, layout: MegatronLayout, make: Make | None = None, **options: Any
) -> tuple[float, dict[str, float], dict[str, float], float]:
    """How far weights are after an update, metrics here and of one process, and how far log-probs are."""
    make = make or partial(policy_of, layout)
    batch = make_batch(make(), critic_of(layout))

    def by_one() -> tuple[dict[str, Tensor], UpdateResult]:
        engine = make_engine(make(), FOUR_ROWS)
        last = [engine.update(batch, loss, PLAN, step) for step in range(2)][-1]
        return weights(engine.model), last

    expected_weights, expected = of_first(by_one)
    megatron = make_megatron(make(), FOUR_ROWS, layout, **options)
    for step in range(2):
        found = learn(megatron, batch, loss, PLAN, step)
    rows, parts = share(megatron, batch, mini_batches(batch.response_mask, PLAN, 1))
    first = torch.cat([part.rows for part in parts if part.epoch == 0])  # later epochs deal rows to other ranks
    far = 0.0
    if found.outputs is not None:
        far = float((found.outputs.log_probs[first] - expected.outputs.log_probs[rows][first]).abs().max())
    return distance(whole_weights(megatron), expected_weights), found.metrics, expected.metrics, far


def to_float32(batch: TrainBatch) -> None:
    """What a policy in bfloat16 is trained with."""
    for name in ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs"):
        setattr(batch, name, getattr(batch, name).float())


def narrow(layout: MegatronLayout) -> tuple[float, float]:
    """How far weights are that were updated in bfloat16 beside float32 masters; and the masters themselves."""
    batch = make_batch(policy_of(layout), critic_of(layout))
    to_float32(batch)
    policies = [policy_of(layout, dtype=torch.float32, tie_word_embeddings=True) for _ in range(2)]
    engine = LocalEngine(policies[0], FOUR_ROWS, OPTIONS, compute_dtype=torch.bfloat16)
    megatron = make_megatron(policies[1], FOUR_ROWS, layout, compute_dtype=torch.bfloat16)
    for step in range(2):
        engine.update(batch, LOSS, PLAN, step)
        learn(megatron, batch, LOSS, PLAN, step)
    exported, whole = whole_weights(megatron), megatron.whole_model()
    assert same_bits(dict(megatron.whole_weights()), exported)
    assert engine.masters
    assert all(value.dtype == torch.bfloat16 for value in exported.values())
    with engine.masters.installed():
        expected = weights(engine.model)
    found = weights(whole) if whole is not None else expected
    assert all(value.dtype == torch.float32 for value in found.values())
    rounded = {name: tensor.float() for name, tensor in exported.items()}
    return distance(found, expected), distance(rounded, {name: expected[name] for name in rounded})


def skipped(folder: Path, layout: MegatronLayout) -> tuple[float, float, list[int]]:
    """Skipped updates, how far weights moved, and the bad rows of the incident that was kept."""
    batch = make_batch(policy_of(layout), critic_of(layout))
    batch.advantages[BAD_ROW, 0] = math.nan
    megatron = make_megatron(policy_of(layout), FOUR_ROWS, layout, incident_dir=folder)
    updated = learn(megatron, batch, LOSS, UpdatePlan(ROWS))
    moved = distance(whole_weights(megatron), weights(policy_of(layout)))
    dist.barrier()
    return updated.metrics["skipped_updates"], moved, replay(folder / "step_1") if dist.get_rank() == 0 else []


def resumed(folder: Path, layout: MegatronLayout, make: Make | None = None) -> bool:
    """State goes from one process to these ranks and back without a bit lost, and so do the weights."""
    make = make or partial(policy_of, layout)
    batch = make_batch(make(), critic_of(layout))
    engine = make_engine(make(), FOUR_ROWS)
    engine.update(batch, LOSS, PLAN, 0)
    state, before = copy.deepcopy(engine.state_dict()), tensors_of(engine.model)
    megatron = make_megatron(engine.model, FOUR_ROWS, layout, save=write_model)
    folder.mkdir(exist_ok=True)
    if dist.get_rank() == 0:
        save_state(folder / "one.pt", state)
    dist.barrier()
    assert megatron.load_state(folder / "one.pt") == 1
    back = saved_state(megatron, folder / "ranks")
    if dist.get_rank() > 0:
        return True
    read = AutoModelForCausalLM.from_pretrained(folder / "ranks/actor", dtype=torch.float64)
    return same_state(back, state) and same_bits(tensors_of(read), before)


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """All that files have of a model: weights, and buffers that are no weights."""
    return {name: tensor.double().clone() for name, tensor in model.state_dict().items()}


def resumed_with_corrected_routers(folder: Path, layout: MegatronLayout) -> bool:
    """The same of DeepSeek-V3, whose routers have a buffer beside their weights."""
    return resumed(folder, layout, make_corrected)


def make_corrected() -> PreTrainedModel:
    """DeepSeek-V3 with corrections of its routers, which pretraining leaves there and no gradient moves."""
    model = make_mixture("deepseek_v3")
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.arange(len(buffer)) / 8)  # which float32 has, too: that is what Megatron keeps them in
    return model


def of_speaker(engine_value: Any) -> Any:
    """The value of the last rank, which always has outputs where replicas are not split by context."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, engine_value)
    return every


def everything(folder: Path, layout: MegatronLayout, full: bool) -> dict[str, Any]:
    """All of the above; with `full` also where parts lie."""
    found: dict[str, Any] = {
        "gradients": dict(gradients("gae", layout)),
        "critic": dict(critic_gradients(layout)),
        "averaged": averaged_gradients(layout),
        "inferred": of_speaker(inferred(layout)),
        "updates": [of_speaker(updates(loss, layout)) for loss in (LOSS, SELECTING)],
        "skipped": skipped(folder / "incidents", layout),
        "resumed": resumed(folder / "saved.pt", layout),
    }
    if not depth(layout):  # with more layers, bfloat16 is further away than weights that do not move
        found["narrow"] = narrow(layout)
    if full:
        found["memory"] = {
            str(options): updates(LOSS, layout, **options)[0]
            for options in (dict.fromkeys(MEMORY, True), {"distributed_optimizer": False})
        }
    return found


ONE_KEY_HEAD = {"num_key_value_heads": 1}  # which two ranks share
SOME = ("q_proj", "v_proj", "up_proj", "down_proj")  # of layers that Megatron fuses, and without the last one's input


def qwen_of(layout: MegatronLayout, **options: Any) -> PreTrainedModel:
    """A policy with biases and a tied head."""
    model = tiny_model("qwen2", dtype=torch.float64, **depth(layout), **options)
    use_tether_attention(model)
    return model


def adapter_gradients(layout: MegatronLayout, full: bool) -> Iterator[tuple[str, float]]:
    """How far gradients of adapters, and of a critic's head beside them, are from those of one process; unless `full`,
    of one policy."""
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    policy, critic, qwen = (partial(make, layout) for make in (policy_of, critic_of, qwen_of))
    batch = make_batch(policy(), critic())
    layers = "[03]" if layout.virtual_pipeline else "1"  # the others have nothing to train
    models: dict[str, tuple[Make, LossSpec]] = {
        "policy": (partial(adapted, policy), LOSS),
        "some layers": (partial(adapted, qwen, target_modules=SOME), LOSS),
        "one key head": (partial(adapted, partial(qwen, **ONE_KEY_HEAD), alpha=3), LOSS),
        "one layer": (partial(adapted, policy, target_modules=rf".*\.layers\.{layers}\.mlp\.gate_proj"), LOSS),
        "critic": (partial(adapted, critic), VALUES),
    }
    if layout.pipeline > 1 and not layout.virtual_pipeline:
        models.pop("one layer")  # see `adapter_refusals`
    for name, (make, loss) in models.items() if full else [("some layers", models["some layers"])]:
        engine = make_engine(make())
        engine.accumulate_gradients(batch, loss)
        expected = {name: value for name, value in local_gradients(engine.model).items() if value.any()}
        for how, micro, overrides in ((", recomputed", TOKENS, recomputed), ("", FOUR_ROWS, {}))[: 1 + full]:
            found = whole_gradients(make_megatron(make(), micro, layout, overrides=overrides), batch, loss)
            yield name + how, distance({name: found[name] for name in expected}, expected)


def adapter_refusals(layout: MegatronLayout) -> list[str]:
    """Why adapters of the head, and of a pipeline's last layer alone, are refused."""
    errors = []
    for targets in (("lm_head", "q_proj"), r".*\.layers\.1\.mlp\.gate_proj"):
        try:
            make_megatron(adapted(partial(policy_of, layout), target_modules=targets), FOUR_ROWS, layout)
        except ValueError as error:
            errors.append(str(error))
    return errors


def of_adapters(folder: Path, layout: MegatronLayout, full: bool) -> dict[str, Any]:
    """How far adapters are from those of one process: gradients, updates, the reference, and what is saved."""
    make = partial(adapted, partial(policy_of, layout))
    batch = make_batch(policy_of(layout), critic_of(layout))
    found: dict[str, Any] = {"gradients": dict(adapter_gradients(layout, full))}
    engine = make_engine(make(), FOUR_ROWS)
    megatron = make_megatron(make(), FOUR_ROWS, layout)
    reference, before = megatron.frozen(FOUR_ROWS), whole_weights(megatron)
    for step in range(1 + full):
        expected = engine.update(batch, LOSS, PLAN, step)
        updated = learn(megatron, batch, LOSS, PLAN, step)
    found["norm"] = updated.metrics["grad_norm"] / expected.metrics["grad_norm"] - 1
    after, ours = whole_weights(megatron), weights(engine.model)
    learned = [name for name, p in engine.model.named_parameters() if p.requires_grad]
    found["frozen"] = all(torch.equal(after[name], before[name]) for name in after.keys() - set(learned))
    found["weights"] = distance({name: after[name] for name in learned}, {name: ours[name] for name in learned})
    rows, _ = share(megatron, batch, mini_batches(batch.response_mask, UpdatePlan(ROWS), 0))
    inferred = reference.infer(batch[rows], PolicyForward())
    far = None
    if inferred is not None:
        with torch.no_grad():
            base = PolicyForward()(policy_of(layout), batch[rows])
        far = float((inferred.log_probs - base.log_probs).abs().max())
    found["reference"] = of_speaker(far)
    found["resumed"] = adapters_resumed(folder, engine, layout)
    if full:
        resting = {**dict.fromkeys(MEMORY, True), "distributed_optimizer": False}
        elsewhere = make_megatron(make(), FOUR_ROWS, layout, **resting)
        for step in range(2):
            learn(elsewhere, batch, LOSS, PLAN, step)
        found |= {"refused": adapter_refusals(layout), "memory": same_bits(whole_weights(elsewhere), after)}
        found["narrow"] = narrow_adapters(layout)
    return found


def narrow_adapters(layout: MegatronLayout) -> tuple[float, bool]:
    """How far the gradient's norm in bfloat16 is from that of one process in bfloat16; and whether float32 masters are
    saved, of which the model computes with the rounded values."""
    batch = make_batch(policy_of(layout), critic_of(layout))
    to_float32(batch)
    policies = [adapted(partial(policy_of, layout, dtype=torch.float32)) for _ in range(2)]
    engine = LocalEngine(policies[0], FOUR_ROWS, OPTIONS, compute_dtype=torch.bfloat16)
    megatron = make_megatron(policies[1], FOUR_ROWS, layout, compute_dtype=torch.bfloat16)
    norms = [
        updated.metrics["grad_norm"]
        for updated in (engine.update(batch, LOSS, UpdatePlan(ROWS), 0), learn(megatron, batch, LOSS, UpdatePlan(ROWS)))
    ]
    exported, whole = whole_weights(megatron), megatron.whole_model()
    if whole is None:
        return norms[1] / norms[0] - 1, True
    masters = {name: value for name, value in weights(whole).items() if ".lora_" in name}
    fine = all(value.dtype == torch.float32 for value in weights(whole).values())
    fine = fine and not any(torch.equal(value, value.bfloat16().float()) for value in masters.values())
    rounded = {name: value.bfloat16() for name, value in weights(whole).items()}
    return norms[1] / norms[0] - 1, fine and same_bits(rounded, exported)


def adapters_resumed(folder: Path, engine: LocalEngine, layout: MegatronLayout) -> bool:
    """Adapters and state of one process go to these ranks and back without a bit lost; the merged model, too."""
    megatron = make_megatron(engine.model, FOUR_ROWS, layout, save=save_adapted)
    if dist.get_rank() == 0:
        save_state(folder / "one.pt", engine.state_dict())
        save_adapted(engine.model, folder / "one/actor")
    dist.barrier()
    assert megatron.load_state(folder / "one.pt") == engine.version
    back = saved_state(megatron, folder / "ranks")
    if dist.get_rank() > 0:
        return True
    megatron.check_saving(folder / "tried/actor")
    left, right = (load_file(folder / name / "adapter/adapter_model.safetensors") for name in ("one", "ranks"))
    models = [
        AutoModelForCausalLM.from_pretrained(folder / name / "actor", dtype=torch.float64) for name in ("one", "ranks")
    ]
    same = same_bits(*map(weights, models)) and same_bits(left, right)
    return same and same_state(back, copy.deepcopy(engine.state_dict()))


def balanced_gradients(layout: MegatronLayout) -> tuple[float, float]:
    """How far gradients are with an auxiliary loss (Switch Transformer, equation 4) and a z-loss (ST-MoE, equation 5)
    from those by the formulas, and from those without: the mean over three rows, weighed by their tokens.

    Two replicas have unlike numbers of rows, so that one runs a micro-batch of padding.
    """
    coefficient, of_logits = 0.5, 0.2
    batch, model = make_batch(make_mixture(), make_critic())[:3], make_mixture()
    engine = make_engine(model)
    engine.accumulate_gradients(batch, LOSS)
    without, inputs = local_gradients(engine.model), []
    gates = [layer.mlp.gate for layer in model.model.layers]
    for gate in gates:
        gate.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    chosen, lengths = model.config.num_experts_per_tok, costs(batch)
    for row, length in enumerate(lengths):
        inputs.clear()
        rows = token_rows(batch[[row]], packed=True)
        hidden_states(model, rows.input_ids, rows.position_ids, rows.layout)
        for gate, states in zip(gates, inputs, strict=True):
            logits = states.view(-1, states.shape[-1]) @ gate.weight.T
            shares = logits.softmax(-1)
            counts = torch.bincount(shares.topk(chosen).indices.flatten(), minlength=shares.shape[1])
            balance = shares.shape[1] * (counts / len(shares) / chosen * shares.mean(0)).sum()
            loss = coefficient * balance + of_logits * logits.logsumexp(-1).square().mean()
            (length / sum(lengths) * loss).backward(retain_graph=True)
    losses = {"moe_aux_loss_coeff": coefficient, "moe_z_loss_coeff": of_logits}
    megatron = make_megatron(make_mixture(), ONE_ROW, layout, overrides=losses)
    found = whole_gradients(megatron, batch, LOSS)
    return distance(found, local_gradients(engine.model)), distance(found, without)


def of_experts(folder: Path, layout: MegatronLayout) -> dict[str, Any]:
    """Gradients, updates and state of a mixture of experts."""
    return {
        "gradients": dict(gradients("gae", layout, make_mixture)),
        "balanced": balanced_gradients(layout),
        "updates": of_speaker(updates(LOSS, layout, make_mixture)),
        "resumed": resumed(folder / "saved.pt", layout, make_mixture),
    }


def replays(layout: MegatronLayout, name: str) -> dict[str, Any]:
    """How far gradients are with experts that are given from those of one process, and with those that routers choose;
    and whether the choice that ranks record is that of one process.
    """
    batch = any_experts(make_batch(make_mixture(name), make_critic()), layers=2)
    engine = make_engine(make_mixture(name))
    engine.accumulate_gradients(batch, REPLAYING)
    expected = local_gradients(engine.model)

    def far(megatron: MegatronEngine[Any], loss: LossSpec) -> float:
        every = whole_gradients(megatron, batch, loss)
        return distance({name: every[name] for name in expected}, expected)  # a bias of routers has none

    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    parts = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    found = {}
    for micro, overrides in ((ONE_ROW, {}), (TOKENS, {}), (ONE_ROW, whole), (ONE_ROW, parts)):
        megatron = make_megatron(make_mixture(name), micro, layout, overrides=overrides)
        found[f"{micro}, {overrides}"] = far(megatron, REPLAYING)
    megatron = make_megatron(make_mixture(name), ONE_ROW, layout)
    rows, _ = share(megatron, batch, mini_batches(batch.response_mask, UpdatePlan(ROWS), 0))
    recorded = megatron.infer(batch[rows], PolicyForward(experts="recorded"))
    with torch.no_grad():
        alone = PolicyForward(experts="recorded")(make_mixture(name), batch[rows])
    replayed = megatron.infer(batch[rows], PolicyForward(experts="replayed"))
    same = None
    if recorded is not None:
        sets = (found.routed_experts.sort(dim=-1).values for found in (recorded, alone))
        same = torch.equal(*sets), float((recorded.log_probs - alone.log_probs).abs().max())
        assert replayed.routed_experts is None
    chosen = far(make_megatron(make_mixture(name), ONE_ROW, layout), LOSS)
    return {"gradients": found, "chosen": chosen, "recorded": of_speaker(same)}
