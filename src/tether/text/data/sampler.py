"""The order in which prompts are drawn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tether.keyed_random import permutation


class PromptSampler:
    """Yields batches of row indices, each row exactly once per epoch; resumable after each batch.

    The order of an epoch depends only on (seed, epoch), so the state is the epoch and the number of rows consumed. The
    batch size may differ after a resume.

    The last batch of an epoch may be smaller than `batch_size`; no row is dropped, and no batch mixes two epochs. With
    a
    `batch_size` above `num_prompts`, a batch is the full dataset.

    Args:
        num_prompts: size of the dataset, at least 1.
        batch_size: rows per batch, at least 1.
        shuffle: whether to shuffle the rows in each epoch.
        seed: seed of the shuffling.
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
        """The epoch of the next batch, from 0."""
        return self._epoch

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches per epoch, including a short last one."""
        return -(-self._num_prompts // self.batch_size)

    def next_batch(self) -> list[int]:
        """Return the row indices of the next batch: between 1 and `batch_size`."""
        batch = self._order[self._cursor : self._cursor + self.batch_size].tolist()
        self._cursor += len(batch)
        if self._cursor == self._num_prompts:
            self._epoch += 1
            self._cursor = 0
            self._order = self._order_of(self._epoch)
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the state: the epoch of the next batch, and the number of its rows consumed."""
        return {"epoch": self._epoch, "cursor": self._cursor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from the `state_dict` of a sampler with the same data and seed.

        Raises:
            ValueError: the position is beyond the dataset, which therefore differs.
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
