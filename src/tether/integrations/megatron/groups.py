"""Megatron's process groups over the default group of ``torch.distributed``, created once per process."""

from __future__ import annotations

from dataclasses import replace

import torch
from megatron.core import parallel_state as groups
from megatron.core import tensor_parallel

from tether.integrations.megatron import cpu
from tether.integrations.megatron.layout import MegatronLayout

_started: list[MegatronLayout] = []


def start(layout: MegatronLayout) -> None:
    """Create the groups; a second call with the same layout has no effect.

    Raises:
        ValueError: groups of a different layout exist; Megatron supports one set per process.
    """
    # These fields do not affect the groups.
    layout = replace(layout, sequence_parallel=False, first_stage_layers=None, last_stage_layers=None)
    if _started:
        if _started[0] != layout:
            raise ValueError(
                f"a process has one Megatron layout, here {_started[0]}, and {layout} is requested. Give models that "
                "share processes the same sizes, or place them in separate processes."
            )
        return
    cpu.install()
    groups.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    if torch.cuda.is_available():
        # Recomputation requires these generator states, although nothing is drawn from them.
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    _started.append(layout)
