"""The catalogue of datasets: their locations on the hubs, and the files to create from them.

Rows have the layout of verl's preparation scripts: the same sources, questions, instructions and ground truths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tether.integrations.hubs.problems import apps, humaneval, livecodebench, mbpp, taco
from tether.integrations.hubs.row import Convert, rule_row, text_in
from tether.text.data.columns import LAYOUTS
from tether.types import JsonObject

_GSM8K, _MATH = LAYOUTS
STEPS = "Let's think step by step and output the final answer "

SEARCHES = "Answer questions, and search for what you do not know."
SEARCH = (
    "Think between <think> and </think>, first and whenever you have learned something. Where knowledge is missing, "
    "ask a search engine by <tool_call> query </tool_call>, as often as you need; its results come between "
    "<tool_response> and </tool_response>. At the end give the answer alone between <answer> and </answer>, as in "
    "<answer> Paris </answer>."
)
"""Instruction for a policy with a search tool, with verl's tags."""


@dataclass(frozen=True)
class OutputFile:
    """A file to write."""

    split: str
    """Split of the rows, also recorded in `extra_info`."""
    patterns: tuple[str, ...]
    """Patterns of the hub's files. The files that match the first pattern with any match are read, sorted by name."""
    convert: Convert
    pairs: bool = False
    """Whether the rows are pairs for `tether rm train`."""


@dataclass(frozen=True)
class Dataset:
    """A dataset on a hub."""

    repository: str
    """Name on the Hugging Face hub."""
    files: Mapping[str, OutputFile]
    """Name of each file to write -> its content."""
    modelscope: str | None = None
    """Name on ModelScope, if it differs."""

    def of_file(self, name: str) -> Dataset:
        """Return this dataset, with the hub's file `name` as the source of all its output files."""
        stem = Path(name.removesuffix(".gz")).stem
        files = {
            str(Path(path).with_name(f"{stem}.parquet")): replace(output, split=stem, patterns=(name,))
            for path, output in self.files.items()
        }
        return replace(self, files=files)


def gsm8k(record: JsonObject, split: str, index: int) -> JsonObject:
    """Convert a question of GSM8K; the ground truth is the number after ``####``, without commas."""
    question, answer = text_in(record, "question"), text_in(record, "answer")
    truth = _GSM8K.extract(answer)
    if truth is None:
        raise ValueError(f"no {_GSM8K.mark} at the end of `answer`")
    prompt = f'{question} {STEPS}after "####".'
    return rule_row(prompt, _GSM8K.data_source, truth, split, index, answer=answer, question=question)


def boxed(source: str) -> Convert:
    r"""Return a converter for MATH problems; the ground truth is `answer`, or the last ``\boxed{}`` of the solution."""

    def convert(record: JsonObject, split: str, index: int) -> JsonObject:
        problem, solution = text_in(record, "problem"), text_in(record, "solution")
        truth = record.get("answer") or _MATH.extract(solution)
        if not isinstance(truth, str):
            raise ValueError(f"no {_MATH.mark} in `solution`")
        return rule_row(f"{problem} {STEPS}within \\boxed{{}}.", source, truth, split, index)

    return convert


def preferred(record: JsonObject, split: str, index: int) -> JsonObject:
    """Convert a dialogue of full-hh-rlhf, scored by a reward model; the chosen response is the ground truth."""
    return {
        "data_source": "Dahoas/full-hh-rlhf",
        "prompt": [{"role": "user", "content": text_in(record, "prompt")}],
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": text_in(record, "response")},
        "extra_info": {"split": split, "index": index},
    }


def compared(record: JsonObject, split: str, index: int) -> JsonObject:
    """Convert a preference pair of full-hh-rlhf; as in `preferred`, the prompt is a single user message."""
    return {side: text_in(record, side) for side in ("prompt", "chosen", "rejected")}


def searched(record: JsonObject, split: str, index: int) -> JsonObject:
    """Convert a question of Search-R1 for a policy with a `search` tool; any of its `golden_answers` is correct."""
    question, source = text_in(record, "question"), f"searchR1_{text_in(record, 'data_source')}"
    answers = record.get("golden_answers")
    if not isinstance(answers, list) or not answers or not all(isinstance(one, str) and one.strip() for one in answers):
        raise ValueError(f"no list of answers in `golden_answers`, but {answers!r:.60}")
    truth = {"target": answers}
    create_kwargs = {"ground_truth": truth, "question": question, "data_source": source}
    return {
        "data_source": source,
        "prompt": [
            {"role": "system", "content": SEARCHES},
            {"role": "user", "content": f"{SEARCH} Question: {question}"},
        ],
        "ability": record.get("ability") or "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            "need_tools_kwargs": True,
            "tools_kwargs": {"search": {"create_kwargs": create_kwargs}},
        },
    }


def as_it_is(record: JsonObject, split: str, index: int) -> JsonObject:
    """Return a row unchanged, because it is published in verl's layout."""
    return {key: value for key, value in record.items() if value is not None}


def _splits(convert: Convert, *splits: str, folder: str = "") -> dict[str, OutputFile]:
    """Return one parquet file per split of a hub's dataset."""
    return {
        f"{split}.parquet": OutputFile(
            split,
            tuple(f"{at}{split}*{end}" for at in (folder, "data/", "") for end in (".parquet", ".jsonl")),
            convert,
        )
        for split in splits
    }


_MATH500 = "HuggingFaceH4/MATH-500"
_HH = {split: (f"data/{split}-*.parquet", f"{split}*.jsonl") for split in ("train", "test")}

DATASETS: Mapping[str, Dataset] = {
    "gsm8k": Dataset("openai/gsm8k", _splits(gsm8k, "train", "test", folder="main/"), "AI-ModelScope/gsm8k"),
    "math": Dataset(_MATH.data_source, _splits(boxed(_MATH.data_source), "train", "test")),
    "math500": Dataset(_MATH500, _splits(boxed(_MATH500), "test"), "AI-ModelScope/MATH-500"),
    "full_hh_rlhf": Dataset(
        "Dahoas/full-hh-rlhf",
        {f"rl/{split}.parquet": OutputFile(split, files, preferred) for split, files in _HH.items()}
        | {f"rm/{split}.parquet": OutputFile(split, files, compared, pairs=True) for split, files in _HH.items()},
    ),
    "dapo_math_17k": Dataset(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        {"dapo-math-17k.parquet": OutputFile("train", ("data/dapo-math-17k.parquet", "data/*.parquet"), as_it_is)},
    ),
    "aime_2024": Dataset(
        "BytedTsinghua-SIA/AIME-2024",
        {"aime-2024.parquet": OutputFile("test", ("data/aime-2024.parquet", "data/*.parquet"), as_it_is)},
    ),
    "eurus2": Dataset(
        "PRIME-RL/Eurus-2-RL-Data",
        {f"{split}.parquet": OutputFile(split, (f"{split}*.parquet", f"data/{split}*.parquet"), as_it_is)
         for split in ("train", "validation")},
    ),
    "humaneval": Dataset("openai/openai_humaneval", _splits(humaneval, "test", folder="openai_humaneval/")),
    "mbpp": Dataset(
        "google-research-datasets/mbpp", _splits(mbpp, "train", "validation", "test", folder="full/")
    ),
    "apps": Dataset("codeparrot/apps", _splits(apps, "train", "test")),
    "taco": Dataset(
        "BAAI/TACO",
        {f"{split}.parquet":
         OutputFile(split, (f"{split}/*.arrow", f"ALL/{split}*.parquet", f"data/{split}*.parquet"), taco)
         for split in ("train", "test")},
    ),
    "livecodebench": Dataset("livecodebench/code_generation_lite", _splits(livecodebench, "test")),
    "search_r1": Dataset("PeterJinGo/nq_hotpotqa_train", _splits(searched, "train", "test")),
}  # fmt: skip
