"""The datasets of verl's scripts, downloaded from a hub and converted to the row layout: `tether data pull`.

Read in this order: `catalogue` (the datasets and the conversion of their rows; `problems` has programming problems),
`hub` (the protocol; `hugging_face`, `modelscope` and `local` implement it), `pull`.
"""

from tether.integrations.hubs.catalogue import DATASETS
from tether.integrations.hubs.local import local_dataset
from tether.integrations.hubs.pull import pull_dataset

__all__ = ["DATASETS", "local_dataset", "pull_dataset"]
