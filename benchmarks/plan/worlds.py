"""Peak memory of one rank of many, on a fake process group with fake tensors, beside the formula.

A world is run in a process of its own: tether's own sharding (`tether.text.learning.engines.fsdp`), transformers'
layers with PyTorch's attention, tether's log-probs, one backward pass where gradients and AdamW's moments are there
already. Nothing is allocated; `MemTracker` counts what the allocator would be asked for. Traps: the mesh is made
outside of the fake mode, and the optimizer's step is left out, because the shapes that DTensor infers would be counted
at full size.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

from benchmarks.oracles.environment import ROOT, last_line

GIB = 2**30


@dataclass(frozen=True)
class World:
    """A model over ranks."""

    model: str
    ranks: int
    tokens: int
    recompute: bool = True
    shards: int = -1
    """Ranks that share a copy; fewer than there are: so many copies."""


WORLDS = (
    World("qwen2.5-0.5b", 2, 4096),
    World("qwen2.5-0.5b", 8, 8192),
    World("qwen2.5-0.5b", 8, 4096, recompute=False),
    World("qwen3-0.6b", 8, 16384),
    World("llama-3.2-1b", 4, 8192),
    World("qwen2.5-1.5b", 4, 8192),
    World("qwen2.5-1.5b", 16, 4096, recompute=False),
    World("smollm2-1.7b", 8, 8192),
    World("qwen2.5-3b", 8, 8192),
    World("qwen2.5-3b", 8, 2048, recompute=False),
    World("qwen3-4b", 8, 8192),
    World("qwen2.5-7b", 8, 4096),
    World("qwen2.5-7b", 8, 16384),
    World("qwen2.5-7b", 32, 8192, shards=8),
    World("qwen2.5-7b", 256, 2048),
    World("deepseek-llm-7b", 8, 8192),
    World("llama-3-8b", 16, 8192),
    World("qwen2.5-14b", 32, 8192),
    World("qwen2.5-32b", 64, 8192),
    World("qwen2.5-32b", 256, 16384),
    World("llama-3-70b", 128, 4096),
    World("llama-3-70b", 1024, 8192),
    World("qwen2.5-72b", 512, 8192),
    World("qwen3-30b-a3b", 64, 4096),
    World("qwen3-30b-a3b", 256, 8192),
)


def planned(world: World) -> float:
    """Return the bytes by the formula, without what the process and the allocator take."""
    from tether.plan.architecture import KNOWN
    from tether.plan.memory import Model, idle_memory, total, update

    shards = world.ranks if world.shards < 0 else world.shards
    model = Model(
        "actor", KNOWN[world.model], ranks=world.ranks, shards=shards, sharded=True, recompute=world.recompute
    )
    return total(idle_memory(model)[0]) + total(update(model, world.tokens))


def counted(world: World) -> float:
    """Return the bytes at the peak, as counted in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.plan.worlds", json.dumps(asdict(world))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{world}: {last_line(done.stderr)}")
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Count one world; the last line is the bytes."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoModelForCausalLM, masking_utils

    import tether.kernels.dispatch as dispatch
    from tether.text.learning.engines import fsdp
    from tether.text.models.output import LmHead, token_log_probs

    class WholePeak(MemTracker):
        """Keeps the peak of the device alone: those of all modules, at each operation, take two thirds of the time."""

        def _update_peak_stats(self, peak_state: object) -> None:
            for device, sizes in self._curr_mem_snap.items():
                if sizes["Total"] > self._peak_mem.get(device, 0):
                    self._peak_mem[device], self._peak_mem_snap[device] = sizes["Total"], dict(sizes)

    world = World(**json.loads(sys.argv[1]))
    # Compiled kernels cannot run on fake tensors.
    dispatch._choose = lambda device, dtype: dispatch.REFERENCE  # type: ignore[assignment]
    # It cannot see in fake tensors that all tokens are of one sequence, and a mask [tokens, tokens] would be built.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    fsdp.tensors_of = lambda outputs: [outputs]  # type: ignore[assignment]  # log-probs alone
    torch.distributed.init_process_group("fake", rank=0, world_size=world.ranks, store=FakeStore())
    mesh = fsdp.device_mesh(torch.device("cpu"), world.shards)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config_of(world.model), dtype=torch.float32)
        root = fsdp._shard_model(model, mesh, torch.bfloat16, fsdp.Sharding(shards=world.shards))
        if world.recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        tracker, moments = WholePeak(), list[torch.Tensor]()

        def log_probs() -> torch.Tensor:
            ids = torch.randint(0, 1000, (1, world.tokens))
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
            head = LmHead(model.get_output_embeddings().weight)
            # As on a GPU, whose chunks of the vocabulary are larger than a CPU's.
            return token_log_probs(hidden, head, ids[0], chunk_size=max(256, (1 << 26) // world.tokens)).log_probs

        # As in the second micro-batch of a later update: gradients and moments are there.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            moments += [torch.zeros_like(parameter.to_local()) for _ in range(2)]
        tracker.track_external(model, *(p.grad.to_local() for p in model.parameters()), *moments)
        with tracker:
            root(log_probs)[0].mean().backward()
    peak = tracker.get_tracker_snapshot("peak")
    print(sum(kinds["Total"] for kinds in peak.values()))


def config_of(name: str) -> object:
    """Return the config of transformers for a known model."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    from tether.plan.architecture import KNOWN

    a = KNOWN[name]
    options = {
        "vocab_size": a.vocabulary,
        "hidden_size": a.hidden,
        "intermediate_size": a.intermediate,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_size,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": a.tied,
    }
    if a.experts:
        experts = {"num_experts": a.experts, "num_experts_per_tok": a.active_experts}
        config = Qwen3MoeConfig(**options, **experts, moe_intermediate_size=a.expert_width)
    else:
        config = (Qwen2Config if a.qkv_bias else Qwen3Config if a.qk_norm else LlamaConfig)(**options)
    config._attn_implementation = "sdpa"
    return config


if __name__ == "__main__":
    main()
