"""The part of each rank in these tests: run a tiny model, forward and backward, beside transformers' own."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as groups
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny import PAD_ID, TINY_CONFIGS
from tether.integrations.megatron import MegatronLayout, check, cpu
from tether.integrations.megatron.families import transformer_config
from tether.integrations.megatron.groups import start
from tether.integrations.megatron.layout import experts_of
from tether.integrations.megatron.model import MegatronModel, Role, build
from tether.text.models.critic import load_critic
from tether.text.models.layers import Packed
from tether.text.models.load import load_causal_lm, load_config
from tether.text.models.output import (
    LmHead,
    VocabularyShard,
    hidden_states,
    lm_head_of,
    token_log_probs,
    value_head_of,
    values_from_hidden,
)
from tether.text.models.truncation_record import KeptRecorder, KeptSets

SEED, LENGTHS, MICRO_BATCHES = 11, (7, 5, 9, 4), 4
TEMPERATURE = 0.7


def batches(vocabulary: int) -> list[tuple[Tensor, Tensor, Packed]]:
    """Packed tokens [1, N], what the loss weighs the log-probability of each next token with [N], and their layout.

    Every other one has a prompt and two that continue it.
    """
    generator = torch.Generator().manual_seed(SEED)
    found = []
    for number in range(MICRO_BATCHES):
        lengths = LENGTHS[number % 2 :]
        tokens = sum(lengths)
        ids = torch.randint(0, vocabulary, (1, tokens), generator=generator)
        ids[:, 1::4] = PAD_ID  # the embedding of this token gets no gradient
        weights = torch.randn(tokens, generator=generator, dtype=torch.float64)
        last = torch.tensor(lengths).cumsum(0) - 1
        weights[last] = 0.0  # predicts nothing
        found.append((ids, weights, Packed(lengths, (None, 0, 0) if number % 2 else None)))
    return found


Outputs = tuple[Tensor, Tensor]


def reference(model: PreTrainedModel, role: str) -> tuple[list[Outputs], dict[str, Tensor]]:
    """Log-probabilities and entropies (or values) of each batch by transformers, and the gradient of the loss."""
    outputs, loss = [], torch.zeros(())
    for ids, weights, layout in batches(model.config.vocab_size):
        states = hidden_states(model, ids, layout.position_ids(), layout)
        states = states.flatten(0, -2)
        if role == "critic":
            values = values_from_hidden(states, value_head_of(model))
            found = (values, values)
        else:
            targets = ids[0].roll(-1)
            tokens = token_log_probs(states, lm_head_of(model), targets, temperature=TEMPERATURE, with_entropy=True)
            found = (tokens.log_probs, tokens.entropy)
        outputs.append((found[0].detach(), found[1].detach()))
        loss = loss + loss_of(found, weights)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return outputs, dict(part for name, grad in gradients.items() for part in as_saved(name, grad))


def as_saved(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor as transformers saves it: those of experts, which it holds in one, by themselves."""
    stem, _, kind = name.rpartition(".experts.")
    if not stem:
        yield name, tensor
        return
    for number, of_expert in enumerate(tensor):
        parts = of_expert.chunk(2) if kind == "gate_up_proj" else [of_expert]
        for projection, part in zip(kind.removesuffix("_proj").split("_"), parts, strict=True):
            yield f"{stem}.experts.{number}.{projection}_proj.weight", part


def loss_of(outputs: Outputs, weights: Tensor) -> Tensor:
    """Of a batch; the batches' sum is the loss."""
    first, second = outputs
    return (first * weights).sum() + 0.3 * (second.square() * weights.abs()).sum()


def megatron_outputs(model: MegatronModel) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Of the batches of this rank's replica, where the pipeline ends: places and outputs; leaves gradients behind."""
    ddp = [
        DistributedDataParallel(model.config, DistributedDataParallelConfig(overlap_grad_reduce=False), chunk)
        for chunk in model.chunks
    ]
    model.config.finalize_model_grads_func = finalize_model_grads
    replicas, replica = groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()
    everything = batches(model.hf_config.vocab_size)
    mine = list(range(len(everything)))[replica::replicas]
    found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def forward_step(numbers: Iterator[int], chunk: Any) -> tuple[Tensor, Any]:
        number = next(numbers)
        ids, weights, layout = everything[number]
        shared = model.shared(layout)
        here = torch.arange(ids.shape[1]) if shared is None else shared.indices
        states = model.run(chunk, ids[:, here], layout.position_ids()[:, here], shared or layout)

        def loss(states: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            if model.role == "critic":
                outputs = (model.values(states),) * 2
            else:
                tokens = model.log_probs(states, ids[0].roll(-1)[here], temperature=TEMPERATURE, with_entropy=True)
                outputs = (tokens.log_probs, tokens.entropy)
            found[number] = (here, outputs[0].detach(), outputs[1].detach())
            return loss_of(outputs, weights[here]) * len(mine) * replicas, {}  # the schedule and DDP take means

        return states, loss

    for wrapped in ddp:
        wrapped.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(mine) for _ in ddp],
        model=ddp,
        num_microbatches=len(mine),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    return found


@dataclass(frozen=True)
class Case:
    """A model to be compared."""

    folder: Path
    role: Role = "policy"
    dtype: torch.dtype = torch.float64
    overrides: dict[str, Any] = field(default_factory=dict, hash=False)


def compare(layout: MegatronLayout, cases: list[Case]) -> dict[Case, dict[str, float]]:
    """How far outputs, gradients and exported weights of each case are from transformers'."""
    start(layout)
    return {case: differences(layout, case) for case in cases}


def differences(layout: MegatronLayout, case: Case) -> dict[str, float]:
    load = load_critic if case.role == "critic" else load_causal_lm
    theirs = load(case.folder, dtype=torch.float32)
    if experts_of(theirs.config):
        theirs.set_experts_implementation("eager")  # the grouped matmul takes no float64
    theirs.to(case.dtype)
    expected, gradients = reference(theirs, case.role)
    config = load_config(case.folder)
    check(layout, config, dist.get_world_size(), "")
    model = build(config, layout, role=case.role, dtype=case.dtype, overrides=case.overrides)
    model.load(case.folder)
    weights = {name: tensor.clone() for name, tensor in model.export()}
    outputs = megatron_outputs(model)
    with torch.no_grad():
        for chunk in model.chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
    exported = dict(model.export())
    saved = load_file(case.folder / "model.safetensors")
    assert weights.keys() == saved.keys()
    return {
        "outputs": max(
            (
                float((one - other[here])[here < here.max()].abs().max())  # the last token predicts nothing
                for number, (here, *found) in outputs.items()
                for one, other in zip(found, expected[number], strict=True)
            ),
            default=0.0,  # where the pipeline does not end
        ),
        "weights": max(float((weights[name] - saved[name]).abs().max()) for name in saved),
        **{name: float((exported[name] - grad).norm() / grad.norm()) for name, grad in gradients.items()},
    }


def shards() -> dict[str, float]:
    """How far log-probs over a split vocabulary, with tokens cut, and their gradients are from those over the whole."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        states, weight = torch.randn(6, 8, dtype=torch.float64), torch.randn(40, 8, dtype=torch.float64)
        targets, mix = torch.randint(0, 40, (6,)), torch.randn(2, 6, dtype=torch.float64)
        allowed = torch.rand(1, 6, 40) > 0.4
    allowed[0, torch.arange(6), targets] = True
    recorder = KeptRecorder(1, 6, 40, torch.device("cpu"))
    for position in range(6):
        recorder.add(torch.tensor([0]), torch.tensor([position]), allowed[:, position])
    candidates = KeptSets.read(recorder.result(6), torch.arange(6), 40)
    half = 20 * dist.get_rank()
    found: list[dict[str, Tensor]] = []
    for rows, shard in ((slice(0, 40), None), (slice(half, half + 20), VocabularyShard(half, None))):
        hidden, head = states.clone().requires_grad_(), weight[rows].clone().requires_grad_()
        options = {"temperature": 0.7, "candidates": candidates, "with_entropy": True, "with_sum_pi_squared": True}
        tokens = token_log_probs(hidden, LmHead(head), targets, shard=shard, chunk_size=7, **options)
        assert tokens.entropy is not None
        assert tokens.sum_pi_squared is not None
        (tokens.log_probs @ mix[0] + tokens.entropy @ mix[1]).backward()
        assert hidden.grad is not None
        assert head.grad is not None
        if shard is not None:
            dist.all_reduce(hidden.grad)
        outputs = {"log-probs": tokens.log_probs, "entropy": tokens.entropy, "squares": tokens.sum_pi_squared}
        of_rows = head.grad if shard is not None else head.grad[half : half + 20]
        found.append({**outputs, "hidden": hidden.grad, "weight": of_rows})
    whole, split = found
    return {name: float((whole[name] - split[name]).abs().max()) for name in whole}


def refusals(folder: Path) -> dict[str, str]:
    """The errors about input that cannot work."""
    start(MegatronLayout())
    llama, empty = load_config(folder), folder.parent / "empty"
    empty.mkdir()
    deeper, wider, bent = copy.deepcopy(llama), copy.deepcopy(llama), copy.deepcopy(llama)
    deeper.num_hidden_layers, wider.intermediate_size, bent.hidden_act = 3, 64, "gelu"

    def built(config: Any = llama, **overrides: Any) -> MegatronModel:
        return build(config, MegatronLayout(), dtype=torch.float32, overrides=overrides)

    attempts: dict[str, Callable[[], object]] = {
        "family": lambda: built(TINY_CONFIGS["gemma2"]()),
        "unknown": lambda: built(recompute_granularty="full"),
        "unfit": lambda: built(moe_router_load_balancing_type="sinkhorn"),
        "other model": lambda: built(layernorm_epsilon=1e-3),
        "balance": lambda: built(moe_router_load_balancing_type="aux"),
        "no layers": lambda: built(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=0),
        "set elsewhere": lambda: built(tensor_model_parallel_size=2),
        "activation": lambda: built(bent),
        "router": lambda: built(TINY_CONFIGS["deepseek_v3"](norm_topk_prob=False)),
        "lacks": lambda: built(deeper).load(folder),
        "shape": lambda: built(wider).load(folder),
        "empty": lambda: built().load(empty),
        "layout": lambda: start(MegatronLayout(tensor=2)),
    }
    messages = {}
    for name, attempt in attempts.items():
        with pytest.raises(ValueError) as caught:
            attempt()
        messages[name] = str(caught.value)
    return messages


def redirected() -> dict[str, object]:
    """Results of Megatron with and without the redirections, and their effect on other code."""
    groups.initialize_model_parallel()
    config = transformer_config(TINY_CONFIGS["llama"](), MegatronLayout(), torch.float32, {})
    results = []
    for _ in range(2):
        layer = ColumnParallelLinear(8, 12, config=config, init_method=torch.nn.init.ones_, bias=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            x = torch.randn(5, 1, 8, requires_grad=True)
            torch.nn.init.normal_(layer.weight)
        loss = vocab_parallel_cross_entropy(layer(x)[0], torch.arange(5)[:, None]).sum()
        loss.backward()
        results.append((loss.detach(), x.grad, layer.weight.grad))
        cpu.install()
    try:
        torch.zeros(1).cuda()
        cuda = "moved"
    except (AssertionError, RuntimeError):
        cuda = "refused"
    same = all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    redirected_module = sys.modules["megatron.core.tensor_parallel.layers"]
    return {
        "sum": float(results[0][1].sum()), "same bits": same, "type": torch.zeros(1).type(), "cuda": cuda,
        "module": redirected_module.torch.zeros(1, device="cuda").device.type == "cpu",
    }  # fmt: skip
