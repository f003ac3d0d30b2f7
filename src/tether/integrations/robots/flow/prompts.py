"""Prompts of pi0 and pi0.5 as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAD, BEGIN, FIRST_BYTE, BYTES = 0, 2, 3, 256
VOCAB_SIZE = FIRST_BYTE + BYTES + 1
"""Vocabulary size for prompts with bytes as tokens; the last id marks images, and does not occur in prompts."""
STATE_BINS = 256


def task_prompt(task: str) -> str:
    """Return the prompt of pi0."""
    return task if task.endswith("\n") else f"{task}\n"


def task_and_state_prompt(task: str, state: NDArray[np.float32]) -> str:
    """Return the prompt of pi0.5, in which the state [S], scaled to [-1, 1], is written as indices of 256 bins."""
    bins = np.digitize(state, np.linspace(-1, 1, STATE_BINS + 1)[:-1]) - 1
    return f"Task: {task.strip().replace('_', ' ')}, State: {' '.join(map(str, bins))};\nAction: "


def max_prompt_length(with_state: bool, task_bytes: int, state_width: int) -> int:
    """Return the maximum number of tokens of prompts with bytes as tokens."""
    if not with_state:
        return 2 + task_bytes
    return 1 + len(task_and_state_prompt("", np.zeros(0, np.float32)).encode()) + task_bytes + 4 * state_width


class FlowPrompts:
    """Encodes prompts as token ids, padded to one length.

    Args:
        length: L, the number of tokens.
        tokenizer: folder of the tokenizer; None: bytes are the tokens.

    Raises:
        ValueError: there is no tokenizer in the folder.
    """

    def __init__(self, length: int, tokenizer: str | None) -> None:
        self._length, self._tokenizer = length, None if tokenizer is None else _load(tokenizer)

    @property
    def vocab_size(self) -> int:
        """Number of ids, including one that does not occur in prompts."""
        return VOCAB_SIZE if self._tokenizer is None else len(self._tokenizer) + 1

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids [B, L], padded with zeros, and their mask [B, L]; long prompts are truncated."""
        ids = torch.full((len(texts), self._length), PAD)
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        for row, codes in enumerate(map(self._encode, texts)):
            codes = codes[: self._length]
            ids[row, : len(codes)] = torch.tensor(codes)
            mask[row, : len(codes)] = True
        return ids, mask

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            return [BEGIN, *(FIRST_BYTE + code for code in text.encode())]
        codes: list[int] = self._tokenizer(text)["input_ids"]
        return codes


def _load(folder: str) -> Any:
    from transformers import AutoTokenizer  # importing takes seconds

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"policy.tokenizer_path={folder}: no tokenizer can be loaded here ({str(error).splitlines()[0]}). Give "
            "a folder with the tokenizer of the model, PaliGemma's for those of lerobot."
        ) from error
