"""How far a mixture's log-probs are apart with its routers' own choice of experts, and with that of an earlier pass.

    python -m benchmarks.router_replay [--rows 64] [--new-tokens 48] [--write docs/guides/router-replay.md]

Random models of 16 experts in 4 layers, two experts a token. R3: from the sampler, in bfloat16, to the trainer, in
float32, at the same weights. R2: from the trainer before to the trainer after a change of each weight by a thousandth
of its parameter's spread, as by an update.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.resumable import write_between
from tests.tiny import MOE, VOCAB_SIZE, tiny_model
from tether.algorithms import off_policy_metrics
from tether.batch import TrainBatch
from tether.text.learning.losses import PolicyForward, PolicyOutputs
from tether.text.learning.packing import Experts
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams

SIZES = {"num_hidden_layers": 4}
EXPERTS = {"deepseek_v3": {"n_routed_experts": 16}}
BEGIN, END = "<!-- replay:begin -->", "<!-- replay:end -->"
CHANGE = 1e-3


def table(rows: int, new_tokens: int) -> str:
    """A line for each model and kind of replay."""
    lines = [
        "| model | from, to | tokens that go elsewhere | KL, nats per token | KL with the experts replayed |",
        "|---|---|---|---|---|",
    ]
    for name in MOE:
        model = tiny_model(name, **SIZES, **EXPERTS.get(name, {"num_experts": 16}))
        for kind, found in (("R3", _of_sampler(model, rows, new_tokens)), ("R2", _of_update(model, rows, new_tokens))):
            elsewhere, free, replayed = found
            ends = "bfloat16 sampler, float32 trainer" if kind == "R3" else "before, after an update"
            lines.append(f"| {name} | {kind}: {ends} | {elsewhere:.1%} | {free:.1e} | {replayed:.1e} |")
    return "\n".join(lines)


def _of_sampler(model: PreTrainedModel, rows: int, new_tokens: int) -> tuple[float, float, float]:
    batch = _sampled(model, torch.bfloat16, rows, new_tokens)
    own = _outputs(model, batch, "recorded")
    replayed = _outputs(model, batch, "replayed")
    return (
        _elsewhere(batch, own),
        _kl(batch, batch.rollout_log_probs, own),
        _kl(batch, batch.rollout_log_probs, replayed),
    )


def _of_update(model: PreTrainedModel, rows: int, new_tokens: int) -> tuple[float, float, float]:
    batch = _sampled(model, torch.float32, rows, new_tokens)
    old = _outputs(model, batch, "recorded")
    batch.routed_experts = old.routed_experts
    changed, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in changed.parameters():
            if parameter.dim() > 1:
                parameter += CHANGE * parameter.std() * torch.randn(parameter.shape, generator=generator)
    own, replayed = _outputs(changed, batch, "recorded"), _outputs(changed, batch, "replayed")
    return _elsewhere(batch, own), _kl(batch, old.log_probs, own), _kl(batch, old.log_probs, replayed)


def _sampled(model: PreTrainedModel, dtype: torch.dtype, rows: int, new_tokens: int) -> TrainBatch:
    engine = NativeEngine(model, eos_token_ids=frozenset(), dtype=dtype)
    draws = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, VOCAB_SIZE, (rows, 8), generator=draws).tolist()
    rollout = engine.generate(prompts, SamplingParams(new_tokens, record_experts=True), NoiseKey(0, 0))
    return TrainBatch.assemble(rollout, torch.zeros(rows))


def _outputs(model: PreTrainedModel, batch: TrainBatch, experts: Experts) -> PolicyOutputs:
    with torch.no_grad():
        found: PolicyOutputs = PolicyForward(experts=experts)(model, batch)
    return found


def _elsewhere(batch: TrainBatch, found: PolicyOutputs) -> float:
    """Share of the tokens that go to another set of experts in some layer."""
    before, after = batch.routed_experts, found.routed_experts
    assert before is not None
    assert after is not None
    known = (before >= 0).any(dim=-1).any(dim=-1)
    differs = (before.sort(dim=-1).values != after.sort(dim=-1).values).any(dim=-1).any(dim=-1)
    return float(differs[known].float().mean())


def _kl(batch: TrainBatch, before: torch.Tensor, after: PolicyOutputs) -> float:
    """k3 estimate of the KL from the sampler."""
    return off_policy_metrics(after.log_probs, before, batch.response_mask)["rollout_corr/k3_kl"]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(shown := table(given.rows, given.new_tokens))
    if given.write:
        write_between(given.write, BEGIN, END, shown)


if __name__ == "__main__":
    main()
