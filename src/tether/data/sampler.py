"""The order in which prompts are drawn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tether.keyed_random import permutation


class PromptSampler:
    """Deals out row numbers, epoch after epoch, each row exactly once an epoch; resumable at every batch.

    The order of an epoch depends on (seed, epoch) alone, so the whole state is which epoch it is and how many of its
    rows are out. The batch size may differ after a resume.

    The last batch of an epoch holds what is left, which may be less than `batch_size`; nothing is dropped, and no
    batch mixes two epochs. A `batch_size` above `num_prompts` gives the whole dataset.

    Args:
        num_prompts: size of the dataset, at least 1.
        batch_size: rows a batch, at least 1.
        shuffle: False deals rows in their own order.
        seed: only shuffling uses it.
    """

    def __init__(self, num_prompts: int, batch_size: int, *, shuffle: bool, seed: int) -> None:
        assert min(num_prompts, batch_size) > 0, (num_prompts, batch_size)
        self._num_prompts = num_prompts
        self.batch_size = min(batch_size, num_prompts)
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._cursor = 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the next batch belongs to."""
        return self._epoch

    @property
    def batches_per_epoch(self) -> int:
        """Batches of a whole epoch, a short last one included."""
        return -(-self._num_prompts // self.batch_size)

    def next_batch(self) -> list[int]:
        """Return the row numbers of the next batch: between 1 and `batch_size` of them."""
        batch = self._order[self._cursor : self._cursor + self.batch_size].tolist()
        self._cursor += len(batch)
        if self._cursor == self._num_prompts:
            self._epoch += 1
            self._cursor = 0
            self._order = self._order_of(self._epoch)
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return where it stands: the epoch of the next batch, and how many rows of it are out."""
        return {"epoch": self._epoch, "cursor": self._cursor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a `state_dict` of a sampler over the same data with the same seed.

        Raises:
            ValueError: a cursor beyond the dataset, which therefore isn't the same.
        """
        if not 0 <= state["cursor"] < self._num_prompts:
            raise ValueError(
                f"data cursor {state['cursor']} is beyond the dataset's {self._num_prompts} prompts. "
                "Resume with the data files that the checkpoint was trained on."
            )
        self._epoch, self._cursor = state["epoch"], state["cursor"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if self._shuffle:
            return permutation(self._num_prompts, self._seed, epoch, "epoch")
        return np.arange(self._num_prompts)
