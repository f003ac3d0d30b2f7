"""Where weights come from: safetensors of a model's directory, of which each rank reads the slices that it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tether.models.megatron.mapping import Held
from tether.models.megatron.splits import Slices
from tether.runtime.disk import COPY_AGAIN, read_json

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Source(Protocol):
    """Tensors of a model, read as Megatron holds them."""

    @property
    def folder(self) -> Path | str:
        """Where they are, for errors."""
        ...

    def has(self, held: Held) -> bool:
        """Whether a tensor is there."""
        ...

    def read(self, held: Held, rank: int, ranks: int) -> Tensor:
        """The part of a rank.

        Raises:
            ValueError: it is not there, or cannot be read.
        """
        ...


class GivenTensors:
    """Whole tensors by the names of files."""

    folder = "the weights that were given"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def has(self, held: Held) -> bool:
        """See `Source`."""
        return held.hf_names[0] in self._tensors

    def read(self, held: Held, rank: int, ranks: int) -> Tensor:
        """See `Source`."""
        return held.split.read([_Whole(self._tensors[name]) for name in held.hf_names], rank, ranks)


class _Whole:
    """See `Slices`."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: tuple[slice, ...] | slice) -> Tensor:
        return self._tensor[index]

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)


class WeightFiles:
    """The tensors of a directory by name; open while it is entered."""

    def __init__(self, folder: Path) -> None:
        """Look which file has which tensor.

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

    def has(self, held: Held) -> bool:
        """See `Source`."""
        return held.hf_names[0] in self._file_of

    def read(self, held: Held, rank: int, ranks: int) -> Tensor:
        """See `Source`."""
        return held.split.read([self._slices(name) for name in held.hf_names], rank, ranks)

    def _slices(self, name: str) -> Slices:
        if name not in self._file_of:
            raise ValueError(
                f"{self.folder}: its weights lack {name}. The checkpoint is of another model class or is incomplete."
            )
        found: Slices = self._handle(self._file_of[name]).get_slice(name)
        return found

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = self._open.enter_context(safe_open(self.folder / file, "pt"))
        return self._handles[file]

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()
