"""Datasets that verl's scripts read, brought from a hub into the row layout: `tether data pull`.

Read in this order: `catalogue` (which there are, and what becomes of a row; `problems` of a
programming problem), `hub` (where they come from; each has a file of its own, as have files that are `local`), `pull`.
"""

from tether.data.published.catalogue import DATASETS
from tether.data.published.local import local_dataset
from tether.data.published.pull import pull_dataset

__all__ = ["DATASETS", "local_dataset", "pull_dataset"]
