"""The setting of all tables: the model, the prompts, the number of runs, the peers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.speed.machine import Roofline, roofline_of
from benchmarks.speed.peers.processes import Peers
from tether.text.data.prompts import render, tokenize
from tether.text.data.rows import Row
from tether.text.data.sources import load_rows
from tether.text.models.load import load_causal_lm, load_tokenizer

SYNTHETIC = "reasoning_gym:gsm_symbolic?size=256&seed=1"
MAX_PROMPTS = 1024
ASK = ' Let\'s think step by step and output the final answer after "####".'


@dataclass(frozen=True)
class Setting:
    """One call of ``python -m benchmarks``."""

    model: Path
    data: str
    """GSM8K as its authors' jsonl, or whatever ``data.train_files`` takes."""
    quick: bool
    runs: int
    """Rounds that count."""
    peers: Peers = field(repr=False)

    @property
    def threads(self) -> int:
        """Of torch, on all sides."""
        return torch.get_num_threads()

    @property
    def steps_to_warm_up(self) -> int:
        """Updates and steps take three until they have touched all the memory that they come to use; quick: one."""
        return 1 if self.quick else 3

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return load_tokenizer(self.model)

    @cached_property
    def _rooflines(self) -> list[Roofline]:
        return [roofline_of(self.plain_model())]

    @property
    def roofline(self) -> Roofline:
        """The best so far in this call, measured again each time: a disturbed moment must not move every share."""
        self._rooflines.append(self._rooflines[-1].measured_again())
        return self._rooflines[-1]

    @cached_property
    def messages(self) -> list[list[dict[str, Any]]]:
        """Conversations."""
        if self.data.endswith(".jsonl") and "question" in json.loads(
            (lines := Path(self.data).read_text().splitlines())[0]
        ):
            return [[{"role": "user", "content": json.loads(line)["question"] + ASK}] for line in lines[:MAX_PROMPTS]]
        source = load_rows(self.data)
        return [list(source[number].messages) for number in range(min(MAX_PROMPTS, len(source)))]

    @cached_property
    def texts(self) -> list[str]:
        """The conversations in the model's chat format."""
        rows = [Row(tuple(turns), "", None, file=self.data, number=i) for i, turns in enumerate(self.messages)]
        return [render(row, self.tokenizer, None, {}) for row in rows]

    def prompts(self, count: int, first: int = 0) -> list[list[int]]:
        """Token ids of `count` prompts, from number `first` on."""
        chosen = [self.texts[(first + i) % len(self.texts)] for i in range(count)]
        return [ids.tolist() for ids in tokenize(chosen, self.tokenizer)]

    def plain_model(self, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
        """The model as transformers loads it."""
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype)
        return model

    def our_model(self, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
        """The model as tether loads it."""
        return load_causal_lm(self.model, dtype=dtype)
