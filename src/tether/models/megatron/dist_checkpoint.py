"""Weights out of a folder that Megatron's ``dist_checkpointing`` wrote (``torch_dist``); a rank reads what it keeps.

Such a folder knows no layout: it has each tensor whole, in chunks over several files. The layers of a model are
stacked in one tensor (``decoder.layers.mlp.linear_fc2.weight`` [L, E, F]) or have one each
(``decoder.layers.3.mlp...``), and so have the experts of a layer. Norms have names of their own, or those that
Transformer Engine gives them where it fuses them with the matrix behind. Optimizer, random states and layers that
predict further tokens may be there, too; they are not looked at.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.metadata as stored
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from tether.models.megatron.families import has_value_bias
from tether.models.megatron.mapping import ROWS, Held, held_tensors
from tether.models.megatron.splits import GateUp, QueryKeyValue

FORMAT = "torch_dist"
_LATEST = "latest_checkpointed_iteration.txt"
_PARTS = ("embedding.", "decoder.", "output_layer.")
_SIZED_BY_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_MOST_PADDING = 128 * 64  # Megatron fills the vocabulary up to a multiple of 128 x the tensor-parallel ranks
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
_DESCRIBED = (
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "MetadataIndex", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_NAMED = 3  # tensors in an error
Place = tuple[str, tuple[int, ...]]
"""Name of a stored tensor, and the indices of its first dimensions, which count layers and experts."""
Span = tuple[int, int]
"""Start, and the end that is not part of it."""


class DistCheckpoint:
    """The tensors of a folder.

    Args:
        folder: with a ``metadata.json``, or the one above it with a ``latest_checkpointed_iteration.txt``.
        vocabulary: rows of the embedding to take; the folder may have more, with which Megatron filled it up.
        prefix: before all names.

    Raises:
        ValueError: Megatron did not write the folder in this format, or it cannot be read.
    """

    def __init__(self, folder: Path, vocabulary: int, prefix: str = "") -> None:
        self.folder, self._vocabulary, self._prefix = _of_iteration(folder), vocabulary, prefix
        metadata = _read_metadata(self.folder)
        of_tensors = metadata.state_dict_metadata.items()
        self._tensors = {name: tensor for name, tensor in of_tensors if isinstance(tensor, TensorStorageMetadata)}
        self._files: Mapping[MetadataIndex, Any] = metadata.storage_data
        self._chunks: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}

    def has(self, held: Held) -> bool:
        """Whether a tensor is there; where a value head is looked for, that of a language model is none."""
        place = self._place(held)
        return place is not None and not (held.optional and self.shape(place)[0] != 1)

    def read(self, held: Held, rank: int, ranks: int) -> Tensor:
        """The part of a rank."""
        place = self._place(held)
        assert place is not None, f"`check` was to notice that {held.name} is missing"
        rows = self.shape(place)[0]
        if isinstance(held.split, GateUp):
            halves = [_Rows(self, place, first, rows // 2) for first in (0, rows // 2)]
            return held.split.read(halves, rank, ranks)
        rows = min(rows, self._vocabulary) if held.name in _SIZED_BY_VOCABULARY else rows
        split = ROWS if isinstance(held.split, QueryKeyValue) else held.split  # stored in the order of the ranks
        return split.read([_Rows(self, place, 0, rows)], rank, ranks)

    def check(self, hf_config: Any, role: str, theirs: Mapping[str, Tensor]) -> None:
        """Compare with the model that is to hold the weights, and look for the files.

        Args:
            hf_config: of the model.
            role: what stands on the backbone.
            theirs: the model's tensors by their names in the files of transformers, of which the shapes are read.

        Raises:
            ValueError: names tensors that are missing, that the model has no place for, or of another shape, or a file
                that is missing.
        """
        missing, wanted = [], defaultdict[str, dict[tuple[int, ...], tuple[int, ...]]](dict)
        for held in held_tensors(hf_config, role, has_value_bias(hf_config)):
            place = self._place(held)
            if place is None:
                missing += [] if held.optional else [_keys(held.name, held)[0][0]]
            elif self.has(held):
                wanted[place[0]][place[1]] = _expected(held, theirs)
            else:
                wanted[place[0]] = {}  # the head of a language model, which a critic drops
        unlike = list(filter(None, (self._unlike(name, by_index) for name, by_index in wanted.items() if by_index)))
        here = {name.removeprefix(self._prefix) for name in self._tensors if name.startswith(self._prefix)}
        surplus = [name for name in here if name.startswith(_PARTS) and self._prefix + name not in wanted]
        found = [
            f"it {what} {_few(names)}"
            for what, names in (("lacks", missing), ("has", unlike), ("has besides", sorted(surplus)))
            if names
        ]
        if found:
            raise ValueError(
                f"{self.folder}: is the checkpoint of another model than config.json describes: {'; '.join(found)}. "
                "Give the one that was written of this model."
            )
        self._look_for_files(wanted)

    def region(self, place: Place, spans: Sequence[Span]) -> Tensor:
        """A part of a tensor, put together from the chunks that have some of it.

        Raises:
            ValueError: a file that cannot be read, or chunks that do not cover the part.
        """
        name, index = place
        found = torch.empty([end - start for start, end in spans], dtype=self._tensors[name].properties.dtype)
        missing = found.numel()
        for chunk in self._chunks_at(place):
            firsts, sizes = chunk.offsets[len(index) :], chunk.sizes[len(index) :]
            ends = [first + size for first, size in zip(firsts, sizes, strict=True)]
            both = [(max(a, c), min(b, d)) for (a, b), c, d in zip(spans, firsts, ends, strict=True)]
            if any(start >= end for start, end in both):
                continue
            whole = self._load(name, chunk)[tuple(i - o for i, o in zip(index, chunk.offsets, strict=False))]
            part = whole[_slices(both, firsts)]
            found[_slices(both, [start for start, _ in spans])] = part
            missing -= part.numel()
        if missing:
            raise ValueError(f"{self.folder}: lacks {missing} numbers of {name}. Copy or write the checkpoint again.")
        return found

    def shape(self, place: Place) -> tuple[int, ...]:
        """Of the tensor at a place."""
        return tuple(self._tensors[place[0]].size[len(place[1]) :])

    def _place(self, held: Held) -> Place | None:
        names = (held.name, _FUSED_NORMS.get(held.name, held.name))
        places = ((self._prefix + key, index) for name in names for key, index in _keys(name, held))
        return next((place for place in places if place[0] in self._tensors), None)

    def _unlike(self, name: str, wanted: Mapping[tuple[int, ...], tuple[int, ...]]) -> str | None:
        """In words how the shape of a stored tensor differs from what is looked for at its indices."""
        counts = [max(numbers) + 1 for numbers in zip(*wanted, strict=True)]
        size, expected = list(self._tensors[name].size), [*counts, *next(iter(wanted.values()))]
        padded = name.removeprefix(self._prefix) in _SIZED_BY_VOCABULARY and expected[0] > 1
        least = [expected[0], *size[1:]] if padded and 0 <= size[0] - expected[0] < _MOST_PADDING else size
        return None if least == expected else f"{name} {size}, and not {expected}"

    def _look_for_files(self, names: Iterable[str]) -> None:
        ends: dict[str, int] = {}
        for name in names:
            for chunk in self._tensors[name].chunks:
                info = self._files[MetadataIndex(name, chunk.offsets)]
                ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for file, end in ends.items():
            path = self.folder / file
            if not path.is_file() or path.stat().st_size < end:
                what = "is cut short" if path.is_file() else "is missing"
                raise ValueError(f"{path}: {what}; its .metadata names it. Copy the checkpoint again.")

    def _chunks_at(self, place: Place) -> list[ChunkStorageMetadata]:
        name, index = place
        if name not in self._chunks:
            by_index = self._chunks[name] = defaultdict(list)
            for chunk in self._tensors[name].chunks:
                bounds = list(zip(chunk.offsets, chunk.sizes, strict=True))[: len(index)]
                for each in product(*(range(first, first + size) for first, size in bounds)):
                    by_index[each].append(chunk)
        return self._chunks[name][index]

    def _load(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        info = self._files[MetadataIndex(name, chunk.offsets)]
        path = self.folder / info.relative_path
        try:
            with path.open("rb") as file:
                file.seek(info.offset)
                whole: Tensor = torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path}: {name} could not be read ({error}). Copy the checkpoint again.") from error
        return whole


class _Rows:
    """Some rows of a stored tensor; see `tether.models.megatron.splits.Slices`."""

    def __init__(self, checkpoint: DistCheckpoint, place: Place, first: int, rows: int) -> None:
        self._checkpoint, self._place, self._first = checkpoint, place, first
        self._shape = [rows, *checkpoint.shape(place)[1:]]

    def __getitem__(self, index: tuple[slice, ...] | slice) -> Tensor:
        asked = index if isinstance(index, tuple) else (index,)
        every = (*asked, *[slice(None)] * (len(self._shape) - len(asked)))
        spans = [one.indices(size)[:2] for one, size in zip(every, self._shape, strict=True)]
        start, end = spans[0]
        return self._checkpoint.region(self._place, [(self._first + start, self._first + end), *spans[1:]])

    def get_shape(self) -> list[int]:
        return self._shape


class _Unpickler(pickle.Unpickler):
    """Reads where tensors lie, and runs no code that a file names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == stored.__name__ and name in _DESCRIBED:
            return getattr(stored, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        return _Other


class _Other:
    """Stands for anything that is of no interest here."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def _of_iteration(folder: Path) -> Path:
    """The folder of the last iteration, where Megatron-LM made one for each."""
    latest = folder / _LATEST
    if not latest.is_file():
        return folder
    number = latest.read_text().strip()
    return folder / (f"iter_{int(number):07d}" if number.isdecimal() else number)


def _read_metadata(folder: Path) -> stored.Metadata:
    """Where each tensor of a folder lies."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such directory. Give the one that Megatron's dist_checkpointing wrote.")
    if not (folder / "metadata.json").is_file():
        older = any(folder.glob("mp_rank_*"))
        what = "is in Megatron's older format (mp_rank_*)" if older else "has no metadata.json"
        raise ValueError(
            f"{folder}: {what}, so that Megatron's dist_checkpointing did not write it. Give a directory that it "
            f"wrote, or save this one again with --ckpt-format {FORMAT}."
        )
    try:
        kind = json.loads((folder / "metadata.json").read_text())["sharded_backend"]
        if kind == FORMAT:
            with (folder / ".metadata").open("rb") as file:
                found = _Unpickler(file).load()
            assert isinstance(found, stored.Metadata)
            return found
    except (OSError, ValueError, KeyError, TypeError, EOFError, AssertionError, pickle.UnpicklingError) as error:
        raise ValueError(f"{folder}: its metadata could not be read ({error!r}). Copy the checkpoint again.") from error
    raise ValueError(
        f"{folder}: is in the format {kind}, and {FORMAT} is read here. Save it with --ckpt-format {FORMAT}."
    )


def _keys(name: str, held: Held) -> list[Place]:
    """Where a tensor may be, whether layers and experts are stacked or not."""
    found: list[Place] = [("", ())]
    if held.layer is not None:
        found = [(f"decoder.layers.{held.layer}.", ()), ("decoder.layers.", (held.layer,))]
    if held.expert is not None:
        experts: list[Place] = [("mlp.experts.experts.", (held.expert,)), (f"mlp.experts.experts.{held.expert}.", ())]
        found = [(start + end, (*index, *more)) for start, index in found for end, more in experts]
    return [(start + name, index) for start, index in found]


def _expected(held: Held, theirs: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The shape of a whole tensor of Megatron, which has the rows of those of transformers."""
    shapes = [theirs[name].shape for name in held.hf_names]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _slices(spans: Iterable[Span], firsts: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start - first, end - first) for (start, end), first in zip(spans, firsts, strict=True))


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
