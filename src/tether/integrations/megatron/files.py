"""Reads weights from the safetensors of a model's directory; each rank reads only its slices."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tether.integrations.megatron.mapping import TensorMapping
from tether.integrations.megatron.splits import Slices
from tether.runtime.disk import COPY_AGAIN, read_json

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightSource(Protocol):
    """Tensors of a model, read as Megatron's shards."""

    @property
    def folder(self) -> Path | str:
        """The location, for errors."""
        ...

    def has(self, mapping: TensorMapping) -> bool:
        """Return whether a tensor is present."""
        ...

    def read(self, mapping: TensorMapping, rank: int, ranks: int) -> Tensor:
        """Return a rank's shard of a tensor.

        Raises:
            ValueError: the tensor is missing, or cannot be read.
        """
        ...


class LoadedTensors:
    """Full tensors in memory, by their names in files."""

    folder = "the weights in memory"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def has(self, mapping: TensorMapping) -> bool:
        return mapping.hf_names[0] in self._tensors

    def read(self, mapping: TensorMapping, rank: int, ranks: int) -> Tensor:
        return mapping.split.read([_FullTensor(self._tensors[name]) for name in mapping.hf_names], rank, ranks)


class _FullTensor:
    """A tensor in memory with the interface of `Slices`."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: tuple[slice, ...] | slice) -> Tensor:
        return self._tensor[index]

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)


class WeightFiles:
    """The tensors of a directory by name; a context manager that keeps the files open."""

    def __init__(self, folder: Path) -> None:
        """Open the files of a directory, and locate their tensors.

        Raises:
            ValueError: the directory has no safetensors, or they cannot be read.
        """
        self.folder, self._open = folder, ExitStack()
        self._handles: dict[str, Any] = {}
        try:
            if (folder / _INDEX).exists():
                self._file_of = dict(read_json(folder / _INDEX, dict, COPY_AGAIN)["weight_map"])
            elif (folder / _SINGLE).exists():
                self._file_of = dict.fromkeys(self._handle(_SINGLE).keys(), _SINGLE)
            else:
                raise ValueError(
                    f"{folder}: has no {_SINGLE} and no {_INDEX}, which Megatron's ranks read their slices from. Save "
                    "the model once with transformers (model.save_pretrained)."
                )
        except (OSError, SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"{folder}: its weights could not be read ({error}). Copy the files again.") from error

    def has(self, mapping: TensorMapping) -> bool:
        return mapping.hf_names[0] in self._file_of

    def read(self, mapping: TensorMapping, rank: int, ranks: int) -> Tensor:
        return mapping.split.read([self._slices(name) for name in mapping.hf_names], rank, ranks)

    def _slices(self, name: str) -> Slices:
        if name not in self._file_of:
            raise ValueError(
                f"{self.folder}: its weights lack {name}. The checkpoint is of another model class or is incomplete."
            )
        slices: Slices = self._handle(self._file_of[name]).get_slice(name)
        return slices

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = self._open.enter_context(safe_open(self.folder / file, "pt"))
        return self._handles[file]

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()
