"""Custom datasets: a user's class in a Python file, named by `data.custom_cls.path` and `.name`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow
from transformers import PreTrainedTokenizerBase

from tether.runtime.objects import PREFIX, registered_object
from tether.runtime.user_files import import_python_file
from tether.spelling import did_you_mean
from tether.text.data.columns import Columns
from tether.text.data.rows import Rows, RowSource
from tether.text.data.sources import ArrowRecords


class CustomDataset(Protocol):
    """The interface of the user's class, which needs no base class.

    It is instantiated once for the training files and once for the validation files, and every item is read once, in
    order. An item is a row in the layout of `tether.text.data.rows`, which is templated and tokenized like any other
    row, or a `tether.batch.Prompt`, whose `token_ids` are used unchanged and whose `index` is replaced.
    """

    def __init__(
        self, *, data_files: Sequence[str], tokenizer: PreTrainedTokenizerBase, config: Mapping[str, object]
    ) -> None:
        """Accept the files, the policy's tokenizer and the config's `data` section as a mapping."""
        ...

    def __len__(self) -> int:
        """Return the number of prompts."""
        ...

    def __getitem__(self, index: int, /) -> object:
        """Return item `index`: a row as a mapping, or a `Prompt`."""
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
    """Instantiate the user's dataset (a `CustomDataset`) and read all its items.

    Args:
        path: the Python file.
        name: name of the class.
        files: passed to the class.
        tokenizer: passed to the class.
        config: passed to the class.
        columns: the keys of an item; published layouts are recognised.

    Raises:
        ValueError: the file or class is missing or cannot be imported, lacks a method, or has no or invalid items.
            Errors of the class itself propagate.
    """
    cls = _load_class(path, name)
    data_files = [files] if isinstance(files, str) else list(files)
    dataset: CustomDataset = cls(data_files=data_files, tokenizer=tokenizer, config=config)
    records = [dataset[index] for index in range(len(dataset))]
    return _rows_of(f"{path}:{name}", records, columns, from_columns=True)  # True, because the class may read columns


def rows_of_object(name: str, columns: Columns | None = None) -> Rows:
    """Return the rows of a dataset that is an object of this process (`tether.runtime.objects`).

    Args:
        name: name of the object: a sequence of rows like a `CustomDataset`, or a table such as a pandas DataFrame.
        columns: the keys of an item; published layouts are recognised.

    Raises:
        ValueError: it has no length, cannot be indexed, or has invalid items.
    """
    dataset, argument = registered_object(name), name.removeprefix(PREFIX)
    if hasattr(dataset, "__arrow_c_stream__"):  # the tables of pandas, pyarrow and polars
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
    """Return the rows of records, in the layout recognised by their keys."""
    keys = dict.fromkeys(key for record in records if isinstance(record, Mapping) for key in record)
    shown = (columns or Columns()).recognised(tuple(keys), records[0] if records else None)
    return Rows([RowSource(name, records, (), columns=shown, from_columns=from_columns)])


def _load_class(path: str, name: str) -> type[CustomDataset]:
    module = import_python_file(path, "data.custom_cls.path")
    cls = getattr(module, name, None)
    if not isinstance(cls, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise ValueError(f"data.custom_cls.name: {path} has no class `{name}`.{did_you_mean(name, classes)}")
    for method in ("__len__", "__getitem__"):
        if not hasattr(cls, method):
            raise ValueError(f"data.custom_cls: `{name}` of {path} has no {method}; a dataset needs it.")
    return cls
