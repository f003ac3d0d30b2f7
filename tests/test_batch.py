"""Prompts: one array of token ids, whatever the caller has."""

import numpy as np
import pytest
import torch

from tether.batch import Prompt


@pytest.mark.parametrize("ids", [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), torch.tensor([5, 6, 7])])
def test_any_sequence_of_token_ids_becomes_an_array(ids: object) -> None:
    found = Prompt(ids, "toy", None).token_ids  # type: ignore[arg-type]
    assert (found.dtype, found.tolist()) == (np.int32, [5, 6, 7])


def test_an_array_stays_the_one_that_it_is() -> None:
    ids = np.array([5, 6], dtype=np.int32)
    assert Prompt(ids, "toy", None).token_ids is ids


@pytest.mark.parametrize("ids", [[1.5], ["a"], [[1, 2]], [-1], [2**31], 5, None])
def test_what_is_no_list_of_token_ids_is_refused(ids: object) -> None:
    with pytest.raises(ValueError, match=r"Prompt.token_ids: .* is no flat list of token ids"):
        Prompt(ids, "toy", None)  # type: ignore[arg-type]
