"""Pages of docs/reference/algorithms, made of the docstrings: a formula stands once, beside the code that computes it.

`docs/build.py` writes them; `tests/test_docs.py` compares, and demands every label of every page.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from tether import algorithms
from tether.algorithms import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    REQUIRED_AGGREGATION,
    TOKEN_SELECTIONS,
    aggregation,
    distillation,
    kl,
    needs,
    pf_ppo,
    reward_shaping,
    rollout_correction,
    value,
)
from tether.algorithms.advantages import token_baseline

FOLDER = Path(__file__).resolve().parent / "reference/algorithms"
ROOT = FOLDER.parents[2]
REGISTRIES = ("ADVANTAGE_ESTIMATORS", "POLICY_LOSSES", "TOKEN_SELECTIONS", "KL_ESTIMATORS")
LABELS = ("Assumes", "Use it", "Watch", "Keys")
SECTIONS = ("Args", "Returns", "Raises")

Documented = Callable[..., object] | type | ModuleType


@dataclass(frozen=True)
class Doc:
    """A docstring in its parts."""

    summary: str
    paragraphs: tuple[str, ...]
    labels: Mapping[str, str]
    arguments: Mapping[str, str]


@dataclass(frozen=True)
class Page:
    """One file: an algorithm, and what belongs to it."""

    path: str
    title: str
    objects: tuple[Documented, ...]


def parse(item: Documented) -> Doc:
    """Split a docstring into summary, paragraphs, labels (``Watch: ...``) and arguments."""
    summary, *blocks = (inspect.getdoc(item) or "").replace("``", "`").split("\n\n")
    paragraphs, labels, arguments = [], {}, {}
    for block in blocks:
        first = block.split(":", 1)[0]
        if first in LABELS:
            labels |= entries(block, "")
        elif first == "Args":
            arguments = entries(block.split("\n", 1)[1], "    ")
        elif first not in SECTIONS:
            paragraphs.append(block)
    return Doc(summary.replace("\n", " "), tuple(paragraphs), labels, arguments)


def entries(block: str, indent: str) -> dict[str, str]:
    """Read lines ``name: text`` at an indent; lines with a larger one go on."""
    found = re.findall(rf"^{indent}(\S[^:\n]*): (.*(?:\n{indent} +.*)*)", block, re.MULTILINE)
    return {name: re.sub(r"\s*\n\s*", " ", text) for name, text in found}


def pages() -> list[Page]:
    """List every page, estimators and losses in the order of their registries."""
    beside = {"gae": [algorithms.length_adaptive_lambda]}
    beside |= {name: [token_baseline] for name in ("optimal_token_baseline", "tir_optimal_token_baseline")}
    estimators = [
        Page(f"advantages/{name}.md", name, (function, *beside.get(name, [])))
        for name, function in ADVANTAGE_ESTIMATORS.items()
    ]
    beside = {name: [function] for name, function in TOKEN_SELECTIONS.items()}
    beside |= {"decoupled": [algorithms.interpolate_proximal]}
    losses = [
        Page(f"policy_losses/{name}.md", name, (function, *beside.get(name, [])))
        for name, function in POLICY_LOSSES.items()
    ]
    kinds = (kl.k1, kl.absolute, kl.k2, kl.k3, kl.straight_through, algorithms.full_kl, algorithms.apply_kl_penalty)
    taught = (algorithms.distillation_loss, algorithms.forward_kl_topk)
    controllers = (algorithms.FixedKLController, algorithms.AdaptiveKLController)
    aggregations = (algorithms.aggregate_loss, algorithms.masked_mean_ratio)
    normalizers = (algorithms.normalize_rewards_per_batch, algorithms.RunningRewardNormalizer)
    corrections = (algorithms.importance_weights, algorithms.rejection_mask, algorithms.off_policy_metrics)
    return [
        *estimators,
        *losses,
        Page("value_loss.md", "Value loss", (value, algorithms.value_loss, algorithms.explained_variance)),
        Page("kl.md", "KL to the reference", (kl, *kinds, *controllers)),
        Page("distillation.md", "Distillation", (distillation, *taught)),
        Page("aggregation.md", "Aggregation", (aggregation, *aggregations)),
        Page("rollout_correction.md", "Rollout correction", (rollout_correction, *corrections)),
        Page("pf_ppo.md", "PF-PPO", (pf_ppo, algorithms.pf_ppo_indices)),
        Page("reward_shaping.md", "Reward shaping", (reward_shaping, algorithms.overlong_penalty, *normalizers)),
    ]


def render(page: Page) -> str:
    """Write a page: the first object without a heading of its own, the others below theirs."""
    up = "../" * page.path.count("/")
    first, *others = page.objects
    code = inspect.getsourcefile(inspect.unwrap(first))
    assert code is not None
    parts = [f"# {page.title}", body(first)]
    parts += [part for item in others for part in (f"## {heading(item)}", body(item))]
    parts.append(f"Code: `{Path(code).relative_to(ROOT)}`. [All algorithms]({up}index.md)")
    return "\n\n".join(parts) + "\n"


def signature(item: Callable[..., object] | type) -> str:
    """Write a call with the types of its arguments, as it is written in a loop of one's own."""
    inner = inspect.unwrap(item)
    parameters = [p for p in inspect.signature(inner, eval_str=True).parameters.values() if p.name != "self"]
    if not parameters:
        return f"{called(item)}()"
    texts = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in texts:
            texts.append("*")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        texts.append(f"{parameter.name}: {type_text(parameter.annotation)}{default}")
    returns = inspect.signature(inner, eval_str=True).return_annotation
    returned = "" if isinstance(item, type) else f" -> {type_text(returns)}"
    return "\n".join([f"{called(item)}(", *(f"    {text}," for text in texts), f"){returned}"])


def called(item: Callable[..., object] | type) -> str:
    """Name what is called: a registry's entry by its key, anything else by its name."""
    for registry in REGISTRIES:
        for key, function in getattr(algorithms, registry).items():
            if function is item or inspect.unwrap(function) is inspect.unwrap(item):
                return f'{registry}["{key}"]'
    return item.__name__


def type_text(annotation: Any) -> str:
    """Write a type in the words of the shapes' legend."""
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(map(type_text, get_args(annotation)))
    if get_origin(annotation) is Annotated:
        base, *extra = get_args(annotation)
        return f"{base.__name__} {str(extra[0]).removeprefix('a ').removeprefix('number').lstrip(', ')}".strip()
    if hasattr(annotation, "dim_str"):
        kind = {"Int": "integer ", "Bool": "boolean "}.get(annotation.dtype.__name__, "")
        return f"{kind}{annotation.array_type.__name__} [{', '.join(annotation.dim_str.split())}]"
    if annotation is type(None) or get_origin(annotation) is Callable:
        return "None" if annotation is type(None) else "Callable"
    return re.sub(r"(\w+\.)+", "", str(annotation)) if get_args(annotation) else str(annotation.__name__)


def heading(item: Documented) -> str:
    """Name a function; a module that explains the idea of a page is its background."""
    return "Background" if inspect.ismodule(item) else f"`{item.__name__}`"


def body(item: Documented) -> str:
    """Write what a docstring says, below the call."""
    doc = parse(item)
    call = "" if inspect.ismodule(item) else signature(item)
    parts = [*([f"```text\n{call}\n```"] if call else []), doc.summary, *doc.paragraphs]
    if doc.labels:
        parts.append("\n".join(f"- **{label}**: {text}" for label, text in doc.labels.items()))
    if doc.arguments:
        parts.append("Arguments:\n\n" + "\n".join(f"- `{name}`: {text}" for name, text in doc.arguments.items()))
    return "\n\n".join(parts)


def index() -> str:
    """Write the list of all pages."""
    everything = pages()
    estimators = [page for page in everything if page.path.startswith("advantages/")]
    losses = [page for page in everything if page.path.startswith("policy_losses/")]
    others = [page for page in everything if "/" not in page.path]
    lines = [
        "# Algorithms",
        "",
        "Every algorithm of `tether.algorithms`: formula, assumptions, when to use it, the metric to watch, keys.",
        "Written from the docstrings by `docs/build.py`. To choose, see [advantages](../advantages.md) and",
        "[losses](../losses.md).",
        "",
        "In the calls B is rows (one response or one episode each), T response positions, V the vocabulary and R the",
        "components of a reward; `#T` may also be 1. The functions of a registry take the keywords of all of them, and",
        "leave aside what they do not name. An argument of another type, shape or device, or a number out of its",
        "range, is a `ValueError` that names it. Estimators return tensors without gradient; a loss has the gradient",
        "of its first argument only.",
        "",
        "## Advantage estimators",
        "",
        "| name | critic | groups | what it does |",
        "|---|---|---|---|",
    ]
    for page in estimators:
        required = needs(inspect.unwrap(page.objects[0]))
        marks = ["yes" if name in required else "" for name in ("values", "uid")]
        lines.append(f"| {link(page)} | {' | '.join(marks)} | {parse(page.objects[0]).summary} |")
    lines += ["", "## Policy losses", "", "| name | aggregation | what it does |", "|---|---|---|"]
    for page in losses:
        mode = f"`{REQUIRED_AGGREGATION[page.title]}`" if page.title in REQUIRED_AGGREGATION else "any"
        lines.append(f"| {link(page)} | {mode} | {parse(page.objects[0]).summary} |")
    lines += ["", "## The rest", "", "| page | what it is about |", "|---|---|"]
    lines += [f"| {link(page)} | {parse(page.objects[0]).summary} |" for page in others]
    return "\n".join(lines) + "\n"


def link(page: Page) -> str:
    """Link a page from the index."""
    title = page.title if "/" not in page.path else f"`{page.title}`"
    return f"[{title}]({page.path})"


def files() -> dict[Path, str]:
    """Return every file of docs/reference/algorithms, as it should read."""
    return {FOLDER / "index.md": index()} | {FOLDER / page.path: render(page) for page in pages()}
