"""Prompts: rows of files, hubs and procedural tasks in one layout, templated, and dealt out in a resumable order.

Read in this order: `rows` (the layout), `sources` (where rows come from), `prompts` (rows to token ids), `sampler`.
"""

from tether.data.chat import decode, render, tokenize
from tether.data.checks import bos_problem, control_token_problem, cut_problem, repeated_problem, template_problem
from tether.data.custom import load_custom_dataset, rows_of_object
from tether.data.demonstrations import Demonstration
from tether.data.prompts import PromptDataset, PromptOptions
from tether.data.rows import Row
from tether.data.sampler import PromptSampler
from tether.data.sources import load_rows

__all__ = [
    "Demonstration",
    "PromptDataset",
    "PromptOptions",
    "PromptSampler",
    "Row",
    "bos_problem",
    "control_token_problem",
    "cut_problem",
    "decode",
    "lerobot",
    "load_custom_dataset",
    "load_rows",
    "location",
    "render",
    "repeated_problem",
    "rows_of_object",
    "template_problem",
    "tokenize",
]
