"""The instructions of published OpenVLA policies as token ids of Llama."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

FILE = "tokenizer.json"
EMPTY = "▁"
"""The token of a space, which ended each prompt in OpenVLA's training (Llama's id 29871)."""
PADDING = -1
"""The id of padding."""


def of_task(task: str) -> str:
    """Return the prompt of a task in the form with which OpenVLA was trained."""
    return f"In: What action should the robot take to {task.lower()}?\nOut:"


class Prompts:
    """Encodes prompts as token ids of one length, padded on the left.

    Args:
        folder: folder with the tokenizer.
        length: L, ids per prompt.

    Raises:
        ValueError: there is no tokenizer, or it is not Llama's.
    """

    def __init__(self, folder: str, length: int) -> None:
        file = Path(folder) / FILE
        if not file.is_file():
            raise ValueError(
                f"{file} is missing: prompts need the tokenizer of the published policy. Put the files of its "
                "tokenizer beside its weights."
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            raise ValueError(f"{file}: no tokenizer ({error})") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._length = length
        empty = self._tokenizer.token_to_id(EMPTY)
        if empty is None:
            raise ValueError(f"{file}: has no token {EMPTY} of a space, with which prompts end; Llama's has")
        self._empty: int = empty

    def __call__(self, tasks: Sequence[str]) -> Tensor:
        """Return ids [B, L] without the begin token.

        Raises:
            ValueError: a prompt is longer than L.
        """
        ids = torch.full((len(tasks), self._length), PADDING)
        for row, task in enumerate(tasks):
            codes = self._encode(of_task(task))
            if len(codes) > self._length:
                raise ValueError(
                    f"policy.max_prompt_length={self._length}: the prompt of {task!r} has {len(codes)} tokens. Set at "
                    "least as many."
                )
            ids[row, self._length - len(codes) :] = torch.tensor(codes)
        return ids

    def _encode(self, text: str) -> list[int]:
        codes: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return codes if codes[-1] == self._empty else [*codes, self._empty]
