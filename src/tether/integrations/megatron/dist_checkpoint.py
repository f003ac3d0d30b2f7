"""Loads weights from a folder of Megatron's ``dist_checkpointing`` (``torch_dist``); each rank reads its shard.

Such a folder does not depend on the parallel layout: it has each full tensor, in chunks over several files. The layers
of a model are stacked in one tensor (``decoder.layers.mlp.linear_fc2.weight`` [L, E, F]) or have one each
(``decoder.layers.3.mlp...``), and so do the experts of a layer. Norms have their own names, or those that Transformer
Engine uses where it fuses them with the following matrix. The folder may also have optimizer, random states and layers
for multi-token prediction, which are ignored.
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

from tether.integrations.megatron.mapping import ROWS, TensorMapping, tensor_mappings
from tether.integrations.megatron.splits import GateUp, QueryKeyValue

FORMAT = "torch_dist"
_LATEST = "latest_checkpointed_iteration.txt"
_MODULES = ("embedding.", "decoder.", "output_layer.")
_SIZED_BY_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_MAX_PADDING = 128 * 64  # Megatron pads the vocabulary to a multiple of 128 x the tensor-parallel ranks
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
_MAX_NAMES = 3  # maximum number of tensors in an error message
StoredTensor = tuple[str, tuple[int, ...]]
"""Name of a stored tensor, and the indices of its first dimensions, which select layer and expert."""
Span = tuple[int, int]
"""Start and end."""


class DistCheckpoint:
    """The tensors of a folder.

    Args:
        folder: a folder with a ``metadata.json``, or its parent with a ``latest_checkpointed_iteration.txt``.
        vocabulary: number of rows of the embedding; the folder may have more, because Megatron pads it.
        prefix: prefix of all names.

    Raises:
        ValueError: the folder has another format, or it cannot be read.
    """

    def __init__(self, folder: Path, vocabulary: int, prefix: str = "") -> None:
        self.folder, self._vocabulary, self._prefix = _latest_iteration(folder), vocabulary, prefix
        metadata = _read_metadata(self.folder)
        entries = metadata.state_dict_metadata.items()
        self._tensors = {name: tensor for name, tensor in entries if isinstance(tensor, TensorStorageMetadata)}
        self._files: Mapping[MetadataIndex, Any] = metadata.storage_data
        self._chunks: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}

    def has(self, mapping: TensorMapping) -> bool:
        """Return whether a tensor is present; the output layer of a language model does not count as a value head."""
        tensor = self._find(mapping)
        return tensor is not None and not (mapping.optional and self.shape(tensor)[0] != 1)

    def read(self, mapping: TensorMapping, rank: int, ranks: int) -> Tensor:
        """Return a rank's shard."""
        tensor = self._find(mapping)
        assert tensor is not None, f"`check` did not notice that {mapping.name} is missing"
        rows = self.shape(tensor)[0]
        if isinstance(mapping.split, GateUp):
            halves = [_Rows(self, tensor, first, rows // 2) for first in (0, rows // 2)]
            return mapping.split.read(halves, rank, ranks)
        rows = min(rows, self._vocabulary) if mapping.name in _SIZED_BY_VOCABULARY else rows
        split = ROWS if isinstance(mapping.split, QueryKeyValue) else mapping.split  # stored in the order of the ranks
        return split.read([_Rows(self, tensor, 0, rows)], rank, ranks)

    def check(self, hf_config: Any, role: str, hf_tensors: Mapping[str, Tensor]) -> None:
        """Check that the tensors match the model that will load them, and that the files exist.

        Args:
            hf_config: config of the model.
            role: policy or critic, which determines the output layer.
            hf_tensors: the model's tensors under transformers' names; only their shapes are used.

        Raises:
            ValueError: tensors are missing, unknown to the model or of a different shape, or a file is missing.
        """
        missing, expected = [], defaultdict[str, dict[tuple[int, ...], tuple[int, ...]]](dict)
        for mapping in tensor_mappings(hf_config, role):
            tensor = self._find(mapping)
            if tensor is None:
                missing += [] if mapping.optional else [_candidates(mapping.name, mapping)[0][0]]
            elif self.has(mapping):
                expected[tensor[0]][tensor[1]] = _expected_shape(mapping, hf_tensors)
            else:
                expected[tensor[0]] = {}  # the head of a language model, which a critic drops
        mismatches = [self._shape_mismatch(name, by_index) for name, by_index in expected.items() if by_index]
        mismatched = [text for text in mismatches if text is not None]
        present = {name.removeprefix(self._prefix) for name in self._tensors if name.startswith(self._prefix)}
        surplus = [name for name in present if name.startswith(_MODULES) and self._prefix + name not in expected]
        problems = [
            f"it {what} {_few(names)}"
            for what, names in (("lacks", missing), ("has", mismatched), ("also has", sorted(surplus)))
            if names
        ]
        if problems:
            raise ValueError(
                f"{self.folder}: is the checkpoint of another model than config.json describes: {'; '.join(problems)}. "
                "Use the one that was written for this model."
            )
        self._check_files(expected)

    def region(self, tensor: StoredTensor, spans: Sequence[Span]) -> Tensor:
        """Return a region of a tensor, assembled from the chunks that overlap with it.

        Raises:
            ValueError: a file cannot be read, or the chunks do not cover the region.
        """
        name, index = tensor
        result = torch.empty([end - start for start, end in spans], dtype=self._tensors[name].properties.dtype)
        missing = result.numel()
        for chunk in self._chunks_at(tensor):
            firsts, sizes = chunk.offsets[len(index) :], chunk.sizes[len(index) :]
            ends = [first + size for first, size in zip(firsts, sizes, strict=True)]
            overlap = [(max(a, c), min(b, d)) for (a, b), c, d in zip(spans, firsts, ends, strict=True)]
            if any(start >= end for start, end in overlap):
                continue
            values = self._load(name, chunk)[tuple(i - o for i, o in zip(index, chunk.offsets, strict=False))]
            common = values[_slices(overlap, firsts)]
            result[_slices(overlap, [start for start, _ in spans])] = common
            missing -= common.numel()
        if missing:
            raise ValueError(f"{self.folder}: lacks {missing} numbers of {name}. Copy or write the checkpoint again.")
        return result

    def shape(self, tensor: StoredTensor) -> tuple[int, ...]:
        """Return the shape of a stored tensor."""
        return tuple(self._tensors[tensor[0]].size[len(tensor[1]) :])

    def _find(self, mapping: TensorMapping) -> StoredTensor | None:
        names = (mapping.name, _FUSED_NORMS.get(mapping.name, mapping.name))
        candidates = ((self._prefix + key, index) for name in names for key, index in _candidates(name, mapping))
        return next((candidate for candidate in candidates if candidate[0] in self._tensors), None)

    def _shape_mismatch(self, name: str, expected_shapes: Mapping[tuple[int, ...], tuple[int, ...]]) -> str | None:
        """Describe how the shape of a stored tensor differs from the expected shapes at its indices; None if it
        fits."""
        counts = [max(indices) + 1 for indices in zip(*expected_shapes, strict=True)]
        size, expected = list(self._tensors[name].size), [*counts, *next(iter(expected_shapes.values()))]
        padded = name.removeprefix(self._prefix) in _SIZED_BY_VOCABULARY and expected[0] > 1
        unpadded = [expected[0], *size[1:]] if padded and 0 <= size[0] - expected[0] < _MAX_PADDING else size
        return None if unpadded == expected else f"{name} {size}, and not {expected}"

    def _check_files(self, names: Iterable[str]) -> None:
        ends: dict[str, int] = {}
        for name in names:
            for chunk in self._tensors[name].chunks:
                info = self._files[MetadataIndex(name, chunk.offsets)]
                ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for file, end in ends.items():
            path = self.folder / file
            if not path.is_file() or path.stat().st_size < end:
                what = "is truncated" if path.is_file() else "is missing"
                raise ValueError(f"{path}: {what}; its .metadata names it. Copy the checkpoint again.")

    def _chunks_at(self, tensor: StoredTensor) -> list[ChunkStorageMetadata]:
        name, index = tensor
        if name not in self._chunks:
            by_index = self._chunks[name] = defaultdict(list)
            for chunk in self._tensors[name].chunks:
                bounds = list(zip(chunk.offsets, chunk.sizes, strict=True))[: len(index)]
                for entry in product(*(range(first, first + size) for first, size in bounds)):
                    by_index[entry].append(chunk)
        return self._chunks[name][index]

    def _load(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        info = self._files[MetadataIndex(name, chunk.offsets)]
        path = self.folder / info.relative_path
        try:
            with path.open("rb") as file:
                file.seek(info.offset)
                values: Tensor = torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path}: {name} could not be read ({error}). Copy the checkpoint again.") from error
        return values


class _Rows:
    """Some rows of a stored tensor, read through `tether.integrations.megatron.splits.Slices`."""

    def __init__(self, checkpoint: DistCheckpoint, tensor: StoredTensor, first: int, rows: int) -> None:
        self._checkpoint, self._tensor, self._first = checkpoint, tensor, first
        self._shape = [rows, *checkpoint.shape(tensor)[1:]]

    def __getitem__(self, index: tuple[slice, ...] | slice) -> Tensor:
        slices = index if isinstance(index, tuple) else (index,)
        full = (*slices, *[slice(None)] * (len(self._shape) - len(slices)))
        spans = [x.indices(size)[:2] for x, size in zip(full, self._shape, strict=True)]
        start, end = spans[0]
        return self._checkpoint.region(self._tensor, [(self._first + start, self._first + end), *spans[1:]])

    def get_shape(self) -> list[int]:
        return self._shape


class _Unpickler(pickle.Unpickler):
    """Unpickles the locations of tensors, without executing code that a file refers to."""

    def find_class(self, module: str, name: str) -> Any:
        if module == stored.__name__ and name in _DESCRIBED:
            return getattr(stored, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        return _Other


class _Other:
    """Placeholder for objects of ignored classes."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def _latest_iteration(folder: Path) -> Path:
    """Return the folder of the latest iteration, if Megatron-LM created one per iteration; otherwise the folder."""
    latest = folder / _LATEST
    if not latest.is_file():
        return folder
    number = latest.read_text().strip()
    return folder / (f"iter_{int(number):07d}" if number.isdecimal() else number)


def _read_metadata(folder: Path) -> stored.Metadata:
    """Read the locations of the tensors of a folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such directory. Use the one that Megatron's dist_checkpointing wrote.")
    if not (folder / "metadata.json").is_file():
        older = any(folder.glob("mp_rank_*"))
        what = "is in Megatron's older format (mp_rank_*)" if older else "has no metadata.json"
        raise ValueError(
            f"{folder}: {what}, so Megatron's dist_checkpointing did not write it. Use a directory that it "
            f"wrote, or save this one again with --ckpt-format {FORMAT}."
        )
    try:
        kind = json.loads((folder / "metadata.json").read_text())["sharded_backend"]
        if kind == FORMAT:
            with (folder / ".metadata").open("rb") as file:
                metadata = _Unpickler(file).load()
            assert isinstance(metadata, stored.Metadata)
            return metadata
    except (OSError, ValueError, KeyError, TypeError, EOFError, AssertionError, pickle.UnpicklingError) as error:
        raise ValueError(f"{folder}: its metadata could not be read ({error!r}). Copy the checkpoint again.") from error
    raise ValueError(
        f"{folder}: is in the format {kind}, and only {FORMAT} is supported. Save it with --ckpt-format {FORMAT}."
    )


def _candidates(name: str, mapping: TensorMapping) -> list[StoredTensor]:
    """Return possible names of a tensor, with stacked or separate layers and experts."""
    candidates: list[StoredTensor] = [("", ())]
    if mapping.layer is not None:
        candidates = [(f"decoder.layers.{mapping.layer}.", ()), ("decoder.layers.", (mapping.layer,))]
    if mapping.expert is not None:
        experts: list[StoredTensor] = [
            ("mlp.experts.experts.", (mapping.expert,)),
            (f"mlp.experts.experts.{mapping.expert}.", ()),
        ]
        candidates = [(a + b, (*index, *expert)) for a, index in candidates for b, expert in experts]
    return [(start + name, index) for start, index in candidates]


def _expected_shape(mapping: TensorMapping, hf_tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return the shape of a full tensor of Megatron, which concatenates the rows of transformers' tensors."""
    shapes = [hf_tensors[name].shape for name in mapping.hf_names]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _slices(spans: Iterable[Span], firsts: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start - first, end - first) for (start, end), first in zip(spans, firsts, strict=True))


def _few(names: Sequence[str]) -> str:
    others = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + others
