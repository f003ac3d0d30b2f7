"""Megatron's process groups over the default group of ``torch.distributed``, made once in a process."""

from __future__ import annotations

from dataclasses import replace

import torch
from megatron.core import parallel_state as groups
from megatron.core import tensor_parallel

from tether.models.megatron import cpu
from tether.models.megatron.layout import Layout

_started: list[Layout] = []


def start(layout: Layout) -> None:
    """Make the groups; a call with the same layout again does nothing.

    Raises:
        ValueError: groups of another layout exist: Megatron holds one set of them in a process.
    """
    layout = replace(layout, sequence_parallel=False, first_stage_layers=None, last_stage_layers=None)  # of no group
    if _started:
        if _started[0] != layout:
            raise ValueError(
                f"a process has one Megatron layout, here {_started[0]}, and {layout} was asked for. Give models that "
                "share processes the same sizes, or place them in processes of their own."
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
        tensor_parallel.model_parallel_cuda_manual_seed(0)  # recomputation forks its states; nothing is drawn from them
    _started.append(layout)
