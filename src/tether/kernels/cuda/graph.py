"""CUDA graphs: the kernels of a call, recorded and launched together.

A decoding step is hundreds of kernels of a few microseconds each, and launching each from Python takes longer than most
of them run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Graph:
    """The kernels of one call, with the memory that they work on."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def run(self) -> None:
        self._graph.replay()


def capture(function: Callable[[], Result]) -> tuple[Result, Graph]:
    """Record a call of a function without executing it; `Graph.run` computes the result.

    Args:
        function: must have been called before on the same memory, so that lazily loaded modules are present, and must
            not wait for the device or read from it.

    Raises:
        RuntimeError: the function waits for the device or reads from it.
    """
    # torch.cuda.graph would also collect garbage and empty the allocator's cache, which takes longer than many steps.
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")  # other threads, such as a judge's, may use the device
        try:
            result = function()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return result, Graph(graph)
