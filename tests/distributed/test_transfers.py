"""Bytes of what goes to ranks are counted by hand."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.text.learning.batches import make_rollout
from tether.distributed import Transfers
from tether.distributed.transfers import FROM, TO, size_of


@dataclass
class Answer:
    rows: Tensor
    name: str = "none"


def test_bytes_are_those_of_tensors_arrays_and_tokens() -> None:
    assert size_of([torch.ones(3), {"a": np.ones(2)}, (Answer(torch.ones(2, 2)), None, 7)]) == 12 + 16 + 16
    assert size_of([[[1, 2, 3], [4]], "text"]) == 4 * 8
    assert size_of([(False, None), (True, None)]) == 0, "how often one looks whether ranks have written is not counted"
    batch = make_rollout()
    held = [value for value in batch.to_tensordict().values() if isinstance(value, Tensor)]
    assert size_of([(batch, 1)]) == sum(value.nbytes for value in held) > size_of(batch[:2]) > 0


def test_metrics_are_of_what_was_moved_since_the_last_look() -> None:
    transfers = Transfers()
    transfers.add(TO, 3, 0.5)
    transfers.add(TO, 4, 0.25)
    transfers.add(FROM, 5)
    found = transfers.take()
    assert (found["transfer/rows_to_ranks_bytes"], found["timing_s/rows_to_ranks"]) == (7.0, 0.75)
    assert (found["transfer/rows_from_ranks_bytes"], found["transfer/weights_bytes"]) == (5.0, 0.0)
    assert set(transfers.take().values()) == {0.0}
