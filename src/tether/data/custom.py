"""Datasets that the user wrote: a class in a Python file, named by `data.custom_cls.path` and `.name`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow
from transformers import PreTrainedTokenizerBase

from tether.data.columns import Columns
from tether.data.rows import Rows, Source
from tether.data.sources import ArrowRecords
from tether.runtime.objects import PREFIX, held
from tether.runtime.user_files import import_python_file
from tether.spelling import did_you_mean


class CustomDataset(Protocol):
    """The methods of the user's class; it needs no base class.

    It is built once for the training files and once for the validation files, and every item is read once, in
    order. An item is either a row in the layout of `tether.data.rows`, which is then templated and tokenized like
    any other, or a `tether.batch.Prompt` whose `token_ids` are used as they are (its `index` is replaced).
    """

    def __init__(
        self, *, data_files: Sequence[str], tokenizer: PreTrainedTokenizerBase, config: Mapping[str, object]
    ) -> None:
        """Take the files, the policy's tokenizer and the `data` part of the run's config as a mapping."""
        ...

    def __len__(self) -> int:
        """Return the number of prompts."""
        ...

    def __getitem__(self, index: int, /) -> object:
        """Item `index`, from 0: a row mapping or a `Prompt`."""
        ...


def load_custom_dataset(
    path: str,
    name: str,
    *,
    files: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: Mapping[str, object],
    columns: Columns | None = None,
) -> Rows:
    """Build the user's dataset (see `CustomDataset`) and read all its items.

    Args:
        path: the Python file.
        name: the class in it.
        files: handed to the class, which reads them.
        tokenizer: handed to the class.
        config: handed to the class.
        columns: the keys of an item; published layouts are recognised by theirs.

    Raises:
        ValueError: no such file or class, a file that cannot be imported, a class without the two methods, no items,
            or items that break the row layout. What the class itself raises is passed on.
    """
    cls = _load_class(path, name)
    data_files = [files] if isinstance(files, str) else list(files)
    dataset: CustomDataset = cls(data_files=data_files, tokenizer=tokenizer, config=config)
    records = [dataset[index] for index in range(len(dataset))]
    return _rows_of(f"{path}:{name}", records, columns, from_columns=True)  # if its class reads any


def rows_of_object(name: str, columns: Columns | None = None) -> Rows:
    """The rows of a dataset that is an object of this process (see `tether.runtime.objects`).

    Args:
        name: stands for it: a sequence of rows, as `CustomDataset` gives them, or a table (a DataFrame of pandas).
        columns: the keys of an item; published layouts are recognised by theirs.

    Raises:
        ValueError: it has no length or no items by number, or items that break the row layout.
    """
    dataset, argument = held(name), name.removeprefix(PREFIX)
    if hasattr(dataset, "__arrow_c_stream__"):  # tables of pandas, pyarrow and polars
        dataset = _table(dataset, argument)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(dataset, str | Mapping):
        splits = f" ({argument}[{next(iter(dataset))!r}])" if isinstance(dataset, Mapping) and dataset else ""
        kind = type(dataset).__name__
        raise ValueError(f"{argument}: a {kind} is no sequence of rows; give a list, a Dataset{splits} or a DataFrame")
    records = [dataset[index] for index in range(len(dataset))]
    return _rows_of(argument, records, columns, from_columns=not isinstance(dataset, list | tuple))


def _table(table: Any, argument: str) -> ArrowRecords:
    try:
        return ArrowRecords(pyarrow.table(table))
    except pyarrow.ArrowException as error:
        raise ValueError(
            f"{argument}: a {type(table).__name__} that cannot be read as a table ({error}). Let each column have one "
            f"type, or give a list of rows, as {argument}.to_dict('records') does."
        ) from error


def _rows_of(name: str, records: Sequence[object], columns: Columns | None, *, from_columns: bool) -> Rows:
    """Return the rows of records that stand for themselves, in the layout that they show."""
    keys = dict.fromkeys(key for record in records if isinstance(record, Mapping) for key in record)
    shown = (columns or Columns()).recognised(tuple(keys), records[0] if records else None)
    return Rows([Source(name, records, (), columns=shown, from_columns=from_columns)])


def _load_class(path: str, name: str) -> type[CustomDataset]:
    module = import_python_file(path, "data.custom_cls.path")
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise ValueError(f"data.custom_cls.name: {path} has no class `{name}`.{did_you_mean(name, classes)}")
    for method in ("__len__", "__getitem__"):
        if not hasattr(found, method):
            raise ValueError(f"data.custom_cls: `{name}` of {path} has no {method}; a dataset needs it.")
    return found
