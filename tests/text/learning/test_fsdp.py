"""An engine in shards gives what one process gives, whatever the number of ranks."""

import copy
import dataclasses
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from tests.ranks import on_ranks
from tests.text.learning.batches import (
    ROWS,
    make_batch,
    make_critic,
    make_engine,
    make_policy,
    same_bits,
    weights,
)
from tests.text.learning.batches import gradients as local_gradients
from tests.text.learning.fsdp_ranks import (
    OPTIONS,
    learn,
    make_fsdp,
    share,
    stored_weights,
    whole_gradients,
    whole_weights,
)
from tests.tiny import save_tiny, tiny_model
from tether.batch import TrainBatch
from tether.checkpoints import load_state, save_state
from tether.loop.engine import LossSpec, UpdatePlan, UpdateResult, move_state
from tether.loop.incident import replay
from tether.text.learning.engines.fsdp import FsdpEngine
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.engines.shares import join_shares
from tether.text.learning.losses import (
    CriticLoss,
    PolicyForward,
    PolicyLoss,
    ReferenceModel,
    TokenSelection,
    ValueForward,
)
from tether.text.learning.packing import MicroBatching, mini_batches
from tether.text.models.critic import load_critic
from tether.text.models.layers import enable_gradient_checkpointing
from tether.text.models.lazy_weights import has_lazy_weights
from tether.text.models.load import load_causal_lm
from tether.text.models.save import adapter_folder, join_shards, write_model
from tether.text.sampling.engine import eos_token_ids

HAS_PEFT = importlib.util.find_spec("peft") is not None
TOLERANCE = 1e-10
LOSS = LossSpec(PolicyForward(with_entropy=True), PolicyLoss(entropy_coeff=0.03, kl_coef=0.2))
SELECTING = LossSpec(
    PolicyForward(),
    PolicyLoss("clip_cov"),
    TokenSelection("clip_cov", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_cov_ratio": 0.2,
                                "clip_cov_lb": -10.0, "clip_cov_ub": 10.0}),
)  # fmt: skip
LOSSES = {"plain": LOSS, "selecting": SELECTING}
FULL_KL = LossSpec(PolicyForward(with_full_kl=True), PolicyLoss(kl_coef=0.2, kl_kind="full"))
VALUES = LossSpec(ValueForward(), CriticLoss())
PLAN = UpdatePlan(mini_batch_rows=3, epochs=2, shuffle=True)
SHORT_PLAN = UpdatePlan(mini_batch_rows=5, shuffle=True)
ONE_ROW, FOUR_ROWS, TOKENS = MicroBatching(max_rows=1), MicroBatching(max_rows=4), MicroBatching(max_tokens=20)
BAD_ROW = 3


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative to the size of the expected tensor, at the worst parameter."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def on_last(costs: Sequence[float], ranks: int) -> list[list[int]]:
    return [*[[]] * (ranks - 1), list(range(len(costs)))]


@cache
def gradients_of_one(estimator: str, loss: str = "policy") -> tuple[TrainBatch, dict[str, Tensor]]:
    """A batch, and what one process makes of it; the same for all layouts."""
    batch = make_batch(make_policy(), make_critic(), estimator)
    engine = make_engine(make_policy() if loss == "policy" else make_critic())
    engine.accumulate_gradients(batch, LOSS if loss == "policy" else VALUES)
    return batch, local_gradients(engine.model)


@cache
def updates_of_one(
    steps: tuple[int, ...], loss: str = "plain", plan: UpdatePlan = PLAN
) -> tuple[TrainBatch, dict[str, Tensor], UpdateResult]:
    """A batch, the weights that updates by one process leave, and the last of them."""
    batch = make_batch(make_policy(), make_critic())
    engine = make_engine(make_policy(), FOUR_ROWS)
    for step in steps:
        last = engine.update(batch, LOSSES[loss], plan, step)
    return batch, weights(engine.model), last


def gradients(sharding: dict[str, Any]) -> Iterator[tuple[str, float]]:
    batch, expected = gradients_of_one("gae")
    sharded = make_fsdp(make_policy(), ONE_ROW, **sharding)  # one for all of them: each begins a new sum
    yield "all rows on one rank", distance(whole_gradients(sharded, batch, LOSS, on_last), expected)
    for micro in (ONE_ROW, FOUR_ROWS, TOKENS):
        sharded.micro = micro
        yield f"{micro}", distance(whole_gradients(sharded, batch, LOSS), expected)
    grouped, expected_of_grouped = gradients_of_one("grpo")  # other numbers in the same fields
    yield "grpo", distance(whole_gradients(sharded, grouped, LOSS), expected_of_grouped)
    recomputing = make_policy()
    enable_gradient_checkpointing(recomputing)
    sharded = make_fsdp(recomputing, TOKENS, **sharding)
    yield "recomputed", distance(whole_gradients(sharded, batch, LOSS), expected)


def options_of_memory(sharding: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """How far an update is from one process's, with each option that moves or frees weights."""
    batch, expected, _ = updates_of_one((0, 1), plan=SHORT_PLAN)
    resting = {"offload_weights": True, "offload_optimizer": True}
    for options in ({"reshard": False}, {"on_host": True}, resting):
        sharded = make_fsdp(make_policy(), FOUR_ROWS, **sharding, **options)
        for step in range(2):
            learn(sharded, batch, LOSS, SHORT_PLAN, step)
        yield f"{options}", distance(whole_weights(sharded), expected)


def kept_gathered(reshard: bool) -> bool:
    """Whether a layer is whole between its forward and its backward pass."""
    sharded = make_fsdp(make_policy(), FOUR_ROWS, reshard=reshard)
    seen = []
    layer = sharded.model.base_model.layers[0]
    sharded.model.base_model.norm.register_forward_hook(
        lambda *_: seen.append(not isinstance(next(layer.parameters()), DTensor))
    )
    whole_gradients(sharded, make_batch(make_policy(), make_critic()), LOSS)
    return all(seen)


def rounded_sums() -> float:
    """How far gradients are that were summed in bfloat16."""
    batch = make_batch(make_policy(), make_critic())
    exact, rounded = (
        whole_gradients(make_fsdp(make_policy(), FOUR_ROWS, reduce_dtype=dtype), batch, LOSS)
        for dtype in (None, torch.bfloat16)
    )
    return distance(rounded, exact)


def critic_gradients(sharding: dict[str, Any]) -> Iterator[tuple[str, float]]:
    batch, expected = gradients_of_one("gae", "critic")
    sharded = make_fsdp(make_critic(), FOUR_ROWS, **sharding)
    yield "critic", distance(whole_gradients(sharded, batch, VALUES), expected)


def inferred(sharding: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """How far outputs of this rank's rows are from those of one process, at the worst token."""
    policy, critic = make_policy(), make_critic()
    batch = make_batch(policy, critic)
    whole = PolicyForward(temperature=0.7, with_entropy=True, with_sum_pi_squared=True)
    for model, forward in ((policy, whole), (critic, ValueForward(with_bootstrap=True))):
        with torch.no_grad():
            expected = forward(model, batch)
        sharded = make_fsdp(model, FOUR_ROWS, **sharding)
        rows, _ = share(sharded, batch, mini_batches(batch.response_mask, UpdatePlan(ROWS), 0))
        found = sharded.infer(batch[rows], forward)
        for field in dataclasses.fields(expected):
            if (value := getattr(expected, field.name)) is not None:
                assert value.abs().sum() > 0
                yield field.name, float((getattr(found, field.name) - value[rows]).abs().max())


def adapted(make: Callable[[], PreTrainedModel] = make_policy, **options: Any) -> PreTrainedModel:
    """A model with adapters that already do something."""
    lora = pytest.importorskip("tether.text.models.lora")
    model = make()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        lora.add_lora(model, lora.LoraOptions(rank=2, **options))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def save_adapted(model: PreTrainedModel, where: Path) -> None:
    """Save a model with adapters as runs do: merged, and the adapters beside it."""
    lora = pytest.importorskip("tether.text.models.lora")
    lora.save_merged(model, where)
    lora.save_adapter(model, adapter_folder(where))


def adapters(folder: Path, sharding: dict[str, Any]) -> dict[str, float]:
    """How far log-probs of the reference, gradients and updated weights of adapters are from one process's."""
    lora = pytest.importorskip("tether.text.models.lora")
    batch = make_batch(make_policy(), make_critic())
    engine, sharded = (
        make_engine(adapted(), FOUR_ROWS),
        make_fsdp(adapted(), FOUR_ROWS, save=lora.save_merged, **sharding),
    )
    reference = sharded.frozen(FOUR_ROWS, lora.adapter_off)
    rows, _ = share(sharded, batch, mini_batches(batch.response_mask, UpdatePlan(ROWS), 0))
    found = {}
    with torch.no_grad():
        base = PolicyForward()(make_policy(), batch).log_probs[rows]
    found["reference"] = float((reference.infer(batch[rows], PolicyForward()).log_probs - base).abs().max())
    engine.accumulate_gradients(batch, LOSS)
    found["gradients"] = distance(whole_gradients(sharded, batch, LOSS), local_gradients(engine.model))
    for step in range(2):
        reference.infer(batch[rows], PolicyForward())
        engine.update(batch, LOSS, PLAN, step)
        learn(sharded, batch, LOSS, PLAN, step)
    for one in (engine, sharded):
        one.reference = ReferenceModel(one.model, lora.adapter_off)
    engine.accumulate_gradients(batch, FULL_KL)
    found["full KL"] = distance(whole_gradients(sharded, batch, FULL_KL), local_gradients(engine.model))
    updated, before = weights(engine.model), weights(adapted())
    found["weights"] = distance(whole_weights(sharded), updated)
    found["frozen"] = max(float((updated[name] - before[name]).abs().max()) for name in before if "lora" not in name)
    found["learned"] = distance(updated, before)
    parts = saved(sharded, folder, with_state=False)
    if dist.get_rank() == 0:
        assert not list(folder.rglob("state.pt"))
        sharded.check_saving(folder / "tried")
        assert (folder / "tried" / "config.json").exists()
        join_shards([part / "actor" for part in parts], folder / "actor")
        merged = LlamaForCausalLM.from_pretrained(folder / "actor", dtype=torch.float64)
        found["merged"] = distance(weights(merged), dict(lora.merged_state_dict(engine.model)))
    return found


def adapted_critic(folder: Path, sharding: dict[str, Any]) -> dict[str, float]:
    """How far gradients, the merged critic and its adapter on disk are from one process's."""
    lora = pytest.importorskip("tether.text.models.lora")
    batch = make_batch(make_policy(), make_critic())
    engine = make_engine(adapted(make_critic), FOUR_ROWS)
    sharded = make_fsdp(adapted(make_critic), FOUR_ROWS, save=save_adapted, **sharding)
    engine.accumulate_gradients(batch, VALUES)
    found = {"gradients": distance(whole_gradients(sharded, batch, VALUES), local_gradients(engine.model))}
    engine.update(batch, VALUES, PLAN, 0)
    learn(sharded, batch, VALUES, PLAN, 0)
    state = saved_state(sharded, folder, "critic")
    if dist.get_rank() == 0:
        found["states"] = len(state["state"]) - len(sharded.trained)
        files = list((folder / "critic").glob("*.safetensors"))
        names = [name for file in files for name in load_file(file)]
        found["twice"] = len(names) - len({*names})
        merged = load_critic(folder / "critic", dtype=torch.float64)
        found["merged"] = distance(weights(merged), dict(lora.merged_state_dict(engine.model)))
        again = make_critic()
        lora.load_lora(again, folder / "critic_adapter")
        found["loaded"] = distance(weights(again), weights(engine.model))
    return found


def out_of_memory() -> str:
    """The error of a rank that has no memory for a micro-batch."""

    def forward(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    sharded = make_fsdp(make_policy(), MicroBatching(max_rows=4, key="actor.ppo_micro_batch_size_per_gpu"))
    with pytest.raises(ValueError) as caught:
        sharded.infer(make_batch(make_policy(), make_critic()), forward)
    return str(caught.value)


def averaged_gradients() -> float:
    """The negative control: denominators of the rows of a rank."""
    batch = make_batch(make_policy(), make_critic())
    engine = make_engine(make_policy())
    engine.accumulate_gradients(batch, LOSS)
    sharded = make_fsdp(make_policy(), FOUR_ROWS)
    half = batch[torch.arange(ROWS) % dist.get_world_size() == dist.get_rank()]
    sharded.accumulate_gradients(half, LOSS)
    found = {name: p.grad.full_tensor() / dist.get_world_size() for name, p in sharded.model.named_parameters()}
    return distance(found, local_gradients(engine.model))


def updates(loss: str, sharding: dict[str, Any]) -> tuple[float, dict[str, float], dict[str, float], Tensor, Tensor]:
    batch, after, expected = updates_of_one((3,), loss)
    sharded = make_fsdp(make_policy(), FOUR_ROWS, **sharding)
    found = learn(sharded, batch, LOSSES[loss], PLAN, 3)
    minis = mini_batches(batch.response_mask, PLAN, 3)
    rows, parts = share(sharded, batch, minis)
    first = torch.cat([part.rows for part in parts if part.epoch == 0])  # later epochs deal rows to other ranks
    return (
        distance(whole_weights(sharded), after),
        found.metrics,
        expected.metrics,
        found.outputs.log_probs[first] if found.outputs is not None else torch.empty(0),
        expected.outputs.log_probs[rows][first],
    )


def single(batch: TrainBatch) -> TrainBatch:
    """The same in float32."""
    for name in ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs"):
        setattr(batch, name, getattr(batch, name).float())
    return batch


def bits(compute_dtype: torch.dtype | None, folder: Path) -> tuple[bool, float]:
    """Whether weights and optimizer have the bits that one process gives, and how far the weights are apart."""
    batch = single(make_batch(make_policy(), make_critic()))
    policies = [make_policy(dtype=torch.float32, tie_word_embeddings=True) for _ in range(2)]
    engine = LocalEngine(policies[0], FOUR_ROWS, OPTIONS, compute_dtype=compute_dtype)
    sharded = make_fsdp(policies[1], FOUR_ROWS, compute_dtype=compute_dtype, save=write_model)
    for step in range(2):
        engine.update(batch, LOSS, PLAN, step)
        learn(sharded, batch, LOSS, PLAN, step)
    found, expected = whole_weights(sharded), {name: tensor.detach() for name, tensor in engine.export().tensors}
    state = saved_state(sharded, folder)
    same = same_bits(found, expected) and (not state or same_state(state, engine.state_dict()))
    return same, distance(found, expected)


def saved(engine: FsdpEngine, folder: Path, role: str = "actor", *, with_state: bool = True) -> list[Path]:
    """The parts of a checkpoint, one of each rank."""
    parts = [folder / str(rank) for rank in range(dist.get_world_size())]
    parts[dist.get_rank()].mkdir(parents=True)
    engine.begin_saving(parts[dist.get_rank()], role, with_state)
    while not engine.writing()[0]:
        time.sleep(0.01)
    dist.barrier()
    assert engine.writing() == (True, None)
    return parts


def saved_state(engine: FsdpEngine, folder: Path, role: str = "actor") -> dict[str, Any]:
    """The state that is saved beside the weights, on rank 0."""
    parts = saved(engine, folder, role)
    if dist.get_rank() == 0:
        join_shares(parts, folder / role, folder / f"{role}.pt")
    dist.barrier()
    return load_state(folder / f"{role}.pt") if dist.get_rank() == 0 else {}


def same_state(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_state(left[key], right[key]) for key in left)
    return torch.equal(left, right) if isinstance(left, Tensor) else left == right


def skipped(folder: Path, sharding: dict[str, Any]) -> tuple[float, float, list[int]]:
    batch = make_batch(make_policy(), make_critic())
    batch.advantages[BAD_ROW, 0] = math.nan
    sharded = make_fsdp(make_policy(), FOUR_ROWS, incident_dir=folder, **sharding)
    updated = learn(sharded, batch, LOSS, UpdatePlan(ROWS))
    moved = distance(whole_weights(sharded), weights(make_policy()))
    dist.barrier()
    return updated.metrics["skipped_updates"], moved, replay(folder / "step_1") if dist.get_rank() == 0 else []


def resumed(folder: Path) -> bool:
    """State goes from one process to these ranks and back without a bit lost."""
    batch = make_batch(make_policy(), make_critic())
    engine = make_engine(make_policy(), FOUR_ROWS)
    engine.update(batch, LOSS, PLAN, 0)
    state, before = copy.deepcopy(engine.state_dict()), weights(engine.model)
    sharded = make_fsdp(engine.model, FOUR_ROWS, save=write_model)
    folder.mkdir(exist_ok=True)
    if dist.get_rank() == 0:
        save_state(folder / "one.pt", state)
    dist.barrier()
    assert sharded.load_state(folder / "one.pt") == 1
    back = saved_state(sharded, folder / "ranks")
    sharded.load_state(folder / "ranks/actor.pt")
    again = saved_state(sharded, folder / "again")
    if dist.get_rank() > 0:
        return True
    read = LlamaForCausalLM.from_pretrained(folder / "ranks/actor", dtype=torch.float64)
    return same_state(back, state) and same_state(again, state) and same_bits(weights(read), before)


@cache  # of layouts that differ in `shards` alone, which it leaves at all ranks
def read(folder: Path, sequence: int) -> dict[str, tuple[bool, bool]]:
    """Of models whose ranks read their parts from files: whether all bits are there, and no rank read all of them."""
    lora = pytest.importorskip("tether.text.models.lora")
    folder = folder / f"read by {sequence}"
    if dist.get_rank() == 0:
        save_tiny(folder / "tied", tie_word_embeddings=True)
        save_tiny(folder / "apart", dtype=torch.bfloat16)
        AutoModelForCausalLM.from_pretrained(folder / "apart").save_pretrained(folder / "files", max_shard_size="100KB")
    dist.barrier()
    load = partial(load_causal_lm, dtype=torch.float32)
    makers: dict[str, Callable[[torch.device | None], PreTrainedModel]] = {
        "tied": lambda lazy_device: load(folder / "tied", lazy_device=lazy_device),
        "in several files": lambda lazy_device: load(folder / "files", lazy_device=lazy_device),
        "in bfloat16": lambda lazy_device: load_causal_lm(
            folder / "apart", dtype=torch.bfloat16, lazy_device=lazy_device
        ),
        "critic": lambda lazy_device: load_critic(folder / "apart", dtype=torch.float32, lazy_device=lazy_device),
    }

    def adapted(lazy_device: torch.device | None) -> PreTrainedModel:
        model = load(folder / "apart", lazy_device=lazy_device)
        torch.manual_seed(3)
        lora.add_lora(model, lora.LoraOptions(rank=2))
        return model

    narrow = "critic that computes in bfloat16"  # under a head that does not
    found = {}
    for name, make in (makers | {narrow: makers["critic"], "adapters": adapted}).items():
        whole, unread = make(None), make(torch.device("cpu"))
        assert has_lazy_weights(unread)
        size = sum(p.nbytes for p in whole.parameters())
        buffers = same_bits(dict(unread.named_buffers()), dict(whole.named_buffers()))
        ends = name.startswith("critic") or eos_token_ids(unread) == eos_token_ids(whole)
        compute = {"compute_dtype": torch.bfloat16} if name == narrow else {}
        sharded = make_fsdp(unread, FOUR_ROWS, sequence=sequence, **compute)
        expected = {key: value.detach() for key, value in whole.state_dict().items()}
        same = same_bits(whole_weights(sharded), expected)
        same = same and same_bits(stored_weights(sharded), expected if dist.get_rank() == 0 else {})
        most = size / (1 if dist.get_world_size() == 1 else 1.7)
        found[name] = (same and buffers and ends, 0 < sharded.bytes_read <= most)
    return found


def broken(folder: Path) -> str:
    """The error about a weight that is not a number."""
    if dist.get_rank() == 0:
        model = tiny_model("llama")
        torch.nn.init.constant_(model.model.norm.weight, math.nan)
        model.save_pretrained(folder)
    dist.barrier()
    with pytest.raises(ValueError) as caught:
        make_fsdp(load_causal_lm(folder, dtype=torch.float32, lazy_device=torch.device("cpu")), FOUR_ROWS)
    return str(caught.value)


def everything(folder: Path, layouts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Findings for each layout of these ranks; those that know no layout are the same for all."""
    of_ranks: dict[str, Any] = {
        "averaged": averaged_gradients(),
        "out of memory": out_of_memory(),
        "kept gathered": [kept_gathered(True), kept_gathered(False)],
        "rounded": rounded_sums(),
        "float32": bits(None, folder / "float32"),
        "bfloat16": bits(torch.bfloat16, folder / "bfloat16"),
        "broken": broken(folder / "broken"),
        "resumed": resumed(folder / "resumed"),
    }
    return [of_ranks | of_layout(folder / str(number), sharding) for number, sharding in enumerate(layouts)]


def of_layout(folder: Path, sharding: dict[str, Any]) -> dict[str, Any]:
    return {
        "gradients": dict([*gradients(sharding), *critic_gradients(sharding)]),
        "inferred": dict(inferred(sharding)),
        "adapters": adapters(folder / "merged", sharding) if HAS_PEFT else None,
        "adapted critic": adapted_critic(folder / "adapted", sharding) if HAS_PEFT else None,
        "memory": dict(options_of_memory(sharding)),
        "updates": [updates(loss, sharding) for loss in LOSSES],
        "read": read(folder.parent, sharding.get("sequence", 1)),
        "skipped": skipped(folder / "incidents", sharding),
    }


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks": (2, {}),
    "1 rank": (1, {}),
    "2 ranks share rows": (2, {"sequence": 2}),
    "4 ranks": (4, {}),
    "2 x 2 ranks": (4, {"shards": 2}),
    "2 x 2 ranks share rows": (4, {"sequence": 2}),
    "4 ranks share rows": (4, {"sequence": 4, "shards": 2}),
}
"""Name -> number of ranks, and how they divide the work. By default two are launched, and two that share rows in
test_router_replay.py.
"""
QUICK = "2 ranks"


@pytest.fixture(scope="module")
def found_on(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Findings for a layout; ranks are launched once for all slow ones of as many, which they try in turn."""

    @cache
    def launched(ranks: int, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("ranks")
        found = on_ranks(folder, ranks, everything, folder, [LAYOUTS[name][1] for name in names])
        return dict(zip(names, found, strict=True))

    def found(name: str) -> dict[str, Any]:
        ranks = LAYOUTS[name][0]
        alike = [other for other in LAYOUTS if LAYOUTS[other][0] == ranks and (other == QUICK) == (name == QUICK)]
        return launched(ranks, tuple(alike))[name]

    return found


@pytest.fixture(
    scope="module", params=[QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != QUICK)]
)
def group(request: pytest.FixtureRequest, found_on: Callable[[str], dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """The number of ranks, and what they found."""
    return LAYOUTS[request.param][0], found_on(request.param)


def test_gradients_are_those_of_one_process(group: tuple[int, dict[str, Any]]) -> None:
    """Whatever the micro-batches; some ranks have fewer than others, and wait in padding ones."""
    assert {case: worst for case, worst in group[1]["gradients"].items() if not worst < TOLERANCE} == {}
    assert len(group[1]["gradients"]) == 7


def test_outputs_are_those_of_one_process(group: tuple[int, dict[str, Any]]) -> None:
    assert group[1]["inferred"].keys() == {"log_probs", "entropy", "sum_pi_squared", "values", "bootstrap_values"}
    assert max(group[1]["inferred"].values()) < TOLERANCE


def test_out_of_memory_names_the_key_to_lower(group: tuple[int, dict[str, Any]]) -> None:
    said = group[1]["out of memory"]
    assert "a forward or backward pass with actor.ppo_micro_batch_size_per_gpu=4 (CUDA out of memory)" in said
    assert "Lower actor.ppo_micro_batch_size_per_gpu. " in said


def test_each_rank_reads_its_part_of_the_files(group: tuple[int, dict[str, Any]]) -> None:
    assert set(group[1]["read"].values()) == {(True, True)}
    assert len(group[1]["read"]) == 6


def test_weights_that_are_not_finite_are_refused_by_name(group: tuple[int, dict[str, Any]]) -> None:
    assert "1 of its weights have NaN or infinity, first model.norm.weight" in group[1]["broken"]


def test_adapters_train_as_in_one_process(group: tuple[int, dict[str, Any]]) -> None:
    """The reference is the model without them, in turns with updates."""
    pytest.importorskip("peft")
    found = group[1]["adapters"]
    assert max(found[name] for name in ("reference", "gradients")) < TOLERANCE
    assert max(found[name] for name in ("weights", "merged", "full KL")) < 1e-8
    assert found["frozen"] == 0 < found["learned"]


def test_a_critic_with_adapters_trains_and_is_saved_as_in_one_process(group: tuple[int, dict[str, Any]]) -> None:
    """Its head is in one of the files of the merged critic, and in its adapter."""
    pytest.importorskip("peft")
    found = group[1]["adapted critic"]
    assert found["gradients"] < TOLERANCE
    assert max(found["merged"], found["loaded"]) < 1e-8
    assert found["states"] == found["twice"] == 0


def test_means_over_the_rows_of_a_rank_are_noticed(group: tuple[int, dict[str, Any]]) -> None:
    ranks, found = group
    assert found["averaged"] < TOLERANCE if ranks == 1 else found["averaged"] > 1e-3


def test_where_shards_lie_changes_no_result(group: tuple[int, dict[str, Any]]) -> None:
    assert {case: far for case, far in group[1]["memory"].items() if not far < 1e-8} == {}
    assert len(group[1]["memory"]) == 3


def test_options_of_shards_act(group: tuple[int, dict[str, Any]]) -> None:
    ranks, found = group
    assert found["kept gathered"] == [False, True]
    assert 1e-5 < found["rounded"] < 1e-1 or ranks == 1


def test_the_state_of_an_optimizer_moves_but_for_its_steps() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    move_state(optimizer, torch.device("meta"))
    assert {name: value.device.type for name, value in optimizer.state[weight].items()} == {
        "step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta",
    }  # fmt: skip


def test_updates_are_those_of_one_process(group: tuple[int, dict[str, Any]]) -> None:
    """Also where a loss must know all tokens of a mini-batch before it is cut."""
    for far, metrics, expected, log_probs, same_rows in group[1]["updates"]:
        assert far < 1e-8  # Adam makes more of a difference
        assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-9)
        torch.testing.assert_close(log_probs, same_rows, rtol=1e-8, atol=1e-8)


def test_one_rank_has_the_bits_of_one_process(group: tuple[int, dict[str, Any]]) -> None:
    ranks, found = group
    if ranks == 1:
        assert found["float32"] == (True, 0)
        assert found["bfloat16"] == (True, 0)
    assert found["float32"][1] < 1e-3
    assert found["bfloat16"][1] < 0.1


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(group: tuple[int, dict[str, Any]]) -> None:
    assert group[1]["skipped"] == (1, 0, [BAD_ROW])


def test_state_has_no_number_of_ranks(group: tuple[int, dict[str, Any]]) -> None:
    assert group[1]["resumed"]
