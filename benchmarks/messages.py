"""Messages between ranks, counted beside formulas: python -m benchmarks.messages

Collective calls and their bytes on one rank, counted while a tiny policy runs, beside what formulas say. The weights of
a layer are gathered before it runs, freed after it, and gathered again for its backward pass; its gradients are summed
into shards.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from tests.ranks import on_ranks
from tests.text.learning.batches import make_batch, make_critic, make_policy
from tests.text.learning.fsdp_ranks import make_fsdp, share, whole_weights
from tests.text.learning.test_fsdp import LOSS
from tether.batch import TrainBatch
from tether.loop.engine import UpdatePlan
from tether.text.learning.losses import PolicyForward
from tether.text.learning.packing import MicroBatching, mini_batches, token_rows

Messages = Mapping[tuple[str, str], tuple[int, int]]
"""Phase and kind -> how many, and their bytes."""
KINDS = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
}
WIDE = 1024
"""Bytes of a message: shorter ones are of counts and of a row's log-probs."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks": (2, {}),
    "2 ranks, layers not resharded": (2, {"reshard": False}),
    "2 ranks share rows (SP 2)": (2, {"sequence": 2}),
    "4 ranks": (4, {}),
    "4 ranks, HSDP 2 x 2": (4, {"shards": 2}),
}


class Counted(TorchDispatchMode):
    """Counts the collective calls of this rank; a message is as large as the largest tensor of its call."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        kind = KINDS.get(func._opname) if func.namespace in ("c10d", "_c10d_functional") else None
        if kind:
            size = max(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            self.sizes[kind].append(size * args[1] if func.namespace == "_c10d_functional" else size)
        return func(*args, **(kwargs or {}))


def compared(sharding: dict[str, Any]) -> tuple[Messages, Messages]:
    """Counted messages, and those of the formulas."""
    policy, batch = make_policy(), make_batch(make_policy(), make_critic())
    micro = MicroBatching(max_rows=len(batch) if "sequence" in sharding else 2, packed=True)
    engine = make_fsdp(policy, micro, **sharding)
    (mini,) = mini_batches(batch.response_mask, UpdatePlan(mini_batch_rows=len(batch)), 0)
    rows, (part,) = share(engine, batch, [mini])
    mine = batch[rows]
    found = {}
    for phase, run in (
        ("infer", lambda: engine.infer(mine, PolicyForward())),
        ("update", lambda: engine.accumulate_gradients(mine[part.rows], LOSS, part.sizes)),
        ("export", lambda: whole_weights(engine)),
    ):
        with Counted() as counted:
            run()
        for kind, sizes in counted.sizes.items():
            wide = [size for size in sizes if size >= WIDE or phase == "export"]
            if wide:
                found[phase, kind] = len(wide), sum(wide)
    return found, expected(make_policy(), mine, ceil(len(mine) / (micro.max_rows or 1)), sharding)


def expected(policy: PreTrainedModel, rows: TrainBatch, micros: int, sharding: dict[str, Any]) -> Messages:
    """The formulas, for `micros` micro-batches of these rows."""
    weights, config = list(policy.parameters()), policy.config
    layers, width = config.num_hidden_layers, weights[0].element_size()
    groups, total = layers + 1, sum(weight.nbytes for weight in weights)
    passes = 2 if sharding.get("reshard", True) else 1
    found = {
        ("infer", "all-gather"): (micros * groups, micros * total),
        ("update", "all-gather"): (passes * micros * groups, passes * micros * total),
        ("update", "reduce-scatter"): (micros * groups, micros * total),
        ("export", "all-gather"): (len(weights), total),
    }
    if shards := sharding.get("shards"):
        found["update", "all-reduce"] = micros * groups, micros * total // shards
    if ranks := sharding.get("sequence"):
        heads = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim * width
        tokens = ceil(token_rows(rows, packed=True).input_ids.numel() / ranks)
        found["infer", "all-to-all"] = 4 * layers, layers * heads * tokens
        found["update", "all-to-all"] = 8 * layers, 2 * layers * heads * tokens
    return found


def main() -> int:
    """Print the table; the exit code says whether the formulas hold."""
    print("| layout | phase | message | counted | formula | bytes counted | formula |\n|---|---|---|---|---|---|---|")
    hold = True
    for name, (ranks, sharding) in LAYOUTS.items():
        with TemporaryDirectory() as folder:
            counted, formulas = on_ranks(Path(folder), ranks, compared, sharding)
        for key in sorted(counted.keys() | formulas.keys()):
            (count, size), (calls, total) = counted.get(key, (0, 0)), formulas.get(key, (0, 0))
            print(f"| {name} | {' | '.join(key)} | {count} | {calls} | {size} | {total} |", flush=True)
            hold = hold and (count, size) == (calls, total)
    print(f"\nthe formulas {'hold' if hold else 'DO NOT HOLD'}")
    return 0 if hold else 1


if __name__ == "__main__":
    sys.exit(main())
