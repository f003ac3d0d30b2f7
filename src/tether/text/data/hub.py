"""Rows of a Hugging Face hub dataset, memory-mapped by `datasets`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import datasets

from tether.text.data.rows import Records, RowSource


def read_hub(spec: str, repository: str, options: Mapping[str, str]) -> RowSource:
    """Download one split of a hub dataset, unless it is in the cache, and open it.

    Args:
        spec: the user's text, for messages.
        repository: ``owner/name``.
        options: `split` (optional if there is only one), `name` (the configuration), `revision`.

    Raises:
        ValueError: the split is unknown, the dataset is on ModelScope, or the hub does not provide it.
    """
    if repository.startswith("modelscope:"):
        raise ValueError(
            f"{spec}: rows of ModelScope become files first: tether data pull NAME --repository {repository}, with a "
            "NAME of tether data list; then name the file that it writes."
        )
    try:
        splits = datasets.load_dataset(repository, options.get("name"), revision=options.get("revision"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{spec}: neither a file here nor a dataset that the hub gave: {error}. "
            "A local file is named by its path and ends in .parquet, .json or .jsonl."
        ) from error
    names = [str(name) for name in splits]
    split = options.get("split", names[0] if len(names) == 1 else "")
    if split not in names:
        raise ValueError(f"{spec}: choose a split, {repository}?split=...; it has {', '.join(names)}.")
    table = splits[split]
    return RowSource(spec, cast(Records, table), tuple(table.column_names), from_columns=True)
