"""How much of a model does each of Megatron's ranks hold, and what does a conversion cost?

    python -m benchmarks.megatron_memory

For each layout of CPU ranks: the bytes that weights, sums of gradients and the optimizer's state take on the rank that
has most of them, by a formula and as counted after an update; and how long a parameter takes to be read from the
tensors of transformers, and to be exported to them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import on_ranks
from tests.text.learning.batches import ROWS, make_batch, make_critic, make_policy
from tests.text.learning.megatron_ranks import FOUR_ROWS, LOSS, learn, make_megatron
from tests.tiny import tiny_model
from tether.integrations.megatron import MegatronLayout
from tether.integrations.megatron.engine import MegatronEngine
from tether.loop.engine import UpdatePlan
from tether.plan.architecture import from_config
from tether.plan.memory import megatron_state
from tether.text.learning.engines.ranks import gather_objects

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4},
    "qwen2_moe": {"hidden_size": 128, "moe_intermediate_size": 256, "num_hidden_layers": 4, "qkv_bias": False},
}
CASES: tuple[tuple[str, str, int, MegatronLayout, torch.dtype], ...] = (
    ("llama", "TP 2", 2, MegatronLayout(tensor=2), torch.float32),
    ("llama", "PP 2", 2, MegatronLayout(pipeline=2), torch.float32),
    ("llama", "PP 2, 2 virtual stages", 2, MegatronLayout(pipeline=2, virtual_pipeline=2), torch.float32),
    ("llama", "PP 2, 3 and 1 layers", 2, MegatronLayout(pipeline=2, first_stage_layers=3), torch.float32),
    ("llama", "2 replicas", 2, MegatronLayout(), torch.float32),
    ("llama", "2 replicas", 2, MegatronLayout(), torch.bfloat16),
    ("llama", "CP 2", 2, MegatronLayout(context=2), torch.bfloat16),
    ("llama", "TP 2, 2 replicas", 4, MegatronLayout(tensor=2, sequence_parallel=True), torch.bfloat16),
    ("qwen2_moe", "EP 2", 2, MegatronLayout(expert=2), torch.bfloat16),
    ("qwen2_moe", "TP 2, EP 2", 4, MegatronLayout(tensor=2, expert=2, sequence_parallel=True), torch.bfloat16),
    ("qwen2_moe", "TP 2, EP 2, whole experts", 4,
     MegatronLayout(tensor=2, expert=2, expert_tensor=1, sequence_parallel=True), torch.bfloat16),
)  # fmt: skip
TRIES = 3


def held(engine: MegatronEngine[Any]) -> int:
    """Bytes of all tensors that the engine of this rank keeps after an update; each storage counts once."""
    assert engine.optimizer
    tensors: list[Tensor] = [p.data for chunk in engine.megatron.chunks for p in chunk.parameters()]
    tensors += [shard.master.data for shard in engine.shards]
    for chunk in engine._chunks:
        tensors += [buffer.grad_data for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    tensors += [state[name] for state in engine.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def measure(family: str, layout: MegatronLayout, dtype: torch.dtype) -> list[float]:
    """Bytes as predicted and as counted, and nanoseconds a parameter to read and to export."""
    if family == "llama":
        model = make_policy(dtype=torch.float32, **SIZES[family])
    else:
        model = tiny_model(family, **SIZES[family])
    batch = make_batch(make_policy(dtype=torch.float32), make_critic())
    for name in ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs"):
        setattr(batch, name, getattr(batch, name).float())
    engine = make_megatron(model, FOUR_ROWS, layout, compute_dtype=dtype)
    learn(engine, batch, LOSS, UpdatePlan(ROWS))
    weights = dict(model.state_dict())
    numbers = sum(p.numel() for p in model.parameters())
    seconds = [_least(lambda: engine._read(weights)), _least(lambda: list(engine.export().tensors))]
    sizes = from_config(model.config.to_dict(), family)
    expected = megatron_state(sizes, layout, dist.get_world_size(), dtype.itemsize)
    return [expected, max(gather_objects(held(engine))), *(1e9 * one / numbers for one in seconds)]


def _least(work: Callable[[], object]) -> float:
    """Seconds of the fastest try, on the slowest rank."""
    found = []
    for _ in range(TRIES):
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        found.append(time.perf_counter() - start)
    return min(found)


def main() -> int:
    """Print the table; 0 if what is counted is what the formula says, else 1."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| model | layout | format | by formula | counted | read | export |\n|---|---|---|---|---|---|---|")
    same = True
    for family, name, ranks, layout, dtype in CASES:
        with TemporaryDirectory() as folder:
            expected, found, read, export = on_ranks(Path(folder), ranks, measure, family, layout, dtype)
        bytes_of = f"{expected / 1e6:.3f} MB | {found / 1e6:.3f} MB"
        kind = str(dtype).removeprefix("torch.")
        print(f"| {family} | {name} | {kind} | {bytes_of} | {read:.0f} ns | {export:.0f} ns |", flush=True)
        same = same and abs(found - expected) < 0.01 * expected
    print(f"\ncounted within 1 % of the formula: {'yes' if same else 'NO'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
