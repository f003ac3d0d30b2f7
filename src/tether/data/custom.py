"""Datasets that the user wrote: a class in a Python file, named by `data.custom_cls.path` and `.name`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from tether.data.columns import Columns
from tether.data.rows import Rows, Source
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
    prompt_key: str = "prompt",
    reward_fn_key: str = "data_source",
) -> Rows:
    """Build the user's dataset (see `CustomDataset`) and read all its items.

    Args:
        path: the Python file.
        name: the class in it.
        files: handed to the class, which reads them.
        tokenizer: handed to the class.
        config: handed to the class.
        prompt_key: the key of an item that holds the prompt.
        reward_fn_key: the key of an item that says which reward scores it.

    Raises:
        ValueError: no such file or class, a file that cannot be imported, a class without the two methods, no items,
            or items that break the row layout. What the class itself raises is passed on.
    """
    cls = _load_class(path, name)
    data_files = [files] if isinstance(files, str) else list(files)
    dataset: CustomDataset = cls(data_files=data_files, tokenizer=tokenizer, config=config)
    records = [dataset[index] for index in range(len(dataset))]
    columns = Columns(prompt=prompt_key, data_source=reward_fn_key)
    return Rows([Source(f"{path}:{name}", records, (), columns=columns, from_columns=True)])  # if its class reads any


def rows_of_object(name: str, *, prompt_key: str = "prompt", reward_fn_key: str = "data_source") -> Rows:
    """The rows of a dataset that is an object of this process (see `tether.runtime.objects`).

    Args:
        name: stands for it: a sequence of rows, as `CustomDataset` gives them.
        prompt_key: the key of an item that holds the prompt.
        reward_fn_key: the key of an item that says which reward scores it.

    Raises:
        ValueError: it has no length or no items by number, or items that break the row layout.
    """
    dataset, argument = held(name), name.removeprefix(PREFIX)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(dataset, str | Mapping):
        raise ValueError(f"{argument}: a {type(dataset).__name__} is no sequence of rows; give a list, or a Dataset")
    records = [dataset[index] for index in range(len(dataset))]
    columns = Columns(prompt=prompt_key, data_source=reward_fn_key)
    return Rows([Source(argument, records, (), columns=columns, from_columns=not isinstance(dataset, list | tuple))])


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
