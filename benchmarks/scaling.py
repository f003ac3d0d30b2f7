"""How time and memory of an update and time of decoding grow with rows, length, vocabulary, model, samples per prompt.

One size at a time is varied and the others stay; an exponent is the slope of the least-squares line through the
logarithms. Models are random Llamas in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.oracles.environment import ROOT
from benchmarks.speed.setting import Setting
from benchmarks.speed.table import Section
from benchmarks.speed.timing import peak_memory, seconds
from tether.batch import TrainBatch
from tether.loop.engine import LossSpec, OptimizerOptions, UpdatePlan
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.losses import PolicyForward, PolicyLoss, PolicyOutputs
from tether.text.learning.packing import MicroBatching
from tether.text.models.layers import use_tether_attention
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams

PICTURE = ROOT / "docs/assets/scaling.png"
MODELS = "model parameters"
REPEATS = 3


@dataclass(frozen=True)
class Size:
    """One point."""

    prompts: int = 4
    samples: int = 1
    prompt_tokens: int = 32
    new_tokens: int = 64
    vocabulary: int = 8192
    width: int = 256
    layers: int = 8
    micro_batches: int = 1

    @property
    def rows(self) -> int:
        """Responses."""
        return self.prompts * self.samples


@dataclass(frozen=True)
class Point:
    """The measurement at one size."""

    parameters: int
    decode: float
    update: float
    peak: float
    """GiB above what the process held before the update."""


@dataclass(frozen=True)
class Axis:
    """The size that varies."""

    name: str
    sizes: Sequence[tuple[float, Size]]
    expected: str


def axes(quick: bool) -> list[Axis]:
    """The sizes of each axis."""
    base = Size()
    rows = (4, 8, 16, 32) if quick else (4, 8, 16, 32, 64, 128)
    lengths = (128, 256, 512) if quick else (128, 256, 512, 1024, 2048, 4096, 8192)
    vocabularies = (8192, 16384, 32768) if quick else (8192, 16384, 32768, 65536, 131072)
    models = ((256, 4), (384, 8)) if quick else ((256, 4), (384, 8), (768, 12), (1280, 24))
    samples = (2, 4, 8) if quick else (2, 4, 8, 16, 32)
    cuts = (1, 2, 4) if quick else (1, 2, 4, 8, 16)
    one = replace(base, prompts=1)
    return [
        Axis("rows", [(n, replace(base, prompts=n)) for n in rows], "1 in time and memory"),
        Axis("response length", [(n, replace(one, new_tokens=n)) for n in lengths], "1, more where attention shows"),
        Axis(
            "vocabulary",
            [(n, replace(base, vocabulary=n)) for n in vocabularies],
            "under 1; memory only by the weights",
        ),
        Axis(MODELS, [(n, replace(base, width=n, layers=d)) for n, d in models], "1"),
        Axis(
            "samples per prompt",
            [(n, replace(one, samples=n, prompt_tokens=256)) for n in samples],
            "under 1: one prompt",
        ),
        Axis("micro-batches", [(n, replace(base, prompts=16, micro_batches=n)) for n in cuts], "0 or less in memory"),
    ]


def random_model(size: Size) -> PreTrainedModel:
    """A Llama of this size."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.width * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.width // 64,
        num_key_value_heads=size.width // 64,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )
    model: PreTrainedModel = LlamaForCausalLM(config).eval()
    use_tether_attention(model)
    return model


def measure_point(size: Size) -> Point:
    """Sample at this size, then learn from it; the fastest of three calls counts, after one that does not."""
    model = random_model(size)
    parameters = sum(p.numel() for p in model.parameters())
    engine: LocalEngine[PolicyOutputs] = LocalEngine(
        model,
        MicroBatching(max_rows=-(-size.rows // size.micro_batches)),
        OptimizerOptions(lr=1e-6),
        compute_dtype=torch.bfloat16,
    )
    sampler = NativeEngine(model, eos_token_ids=frozenset())
    prompts = torch.randint(0, size.vocabulary, (size.prompts, size.prompt_tokens)).tolist()
    sampling = SamplingParams(size.new_tokens, n=size.samples)
    rollout = sampler.generate(prompts, sampling, NoiseKey(0, 0))
    decode = min(seconds(lambda: sampler.generate(prompts, sampling, NoiseKey(0, 1))) for _ in range(REPEATS))
    batch = TrainBatch.assemble(rollout, torch.zeros(len(rollout)))
    batch.old_log_probs = batch.rollout_log_probs
    batch.advantages = torch.randn(len(rollout), 1).expand_as(batch.rollout_log_probs).contiguous()

    def update() -> None:
        engine.update(batch, LossSpec(PolicyForward(), PolicyLoss()), UpdatePlan(len(batch)), step=0)

    update()
    spent: list[float] = []
    before, peak = peak_memory(lambda: spent.extend(seconds(update) for _ in range(REPEATS)))
    return Point(parameters, decode, min(spent), max(peak - before, 1e-3))


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the least-squares line through the logarithms."""
    x, y = [log(size) for size in sizes], [log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


MEASURES: dict[str, Callable[[Point], float]] = {
    "decoding, s": lambda point: point.decode,
    "update, s": lambda point: point.update,
    "update, GiB added": lambda point: point.peak,
}


def measure(setting: Setting) -> Section:
    """Every axis."""
    measured = [(axis, [measure_point(size) for _, size in axis.sizes]) for axis in axes(setting.quick)]
    table = []
    for axis, points in measured:
        at, cells = sizes_along(axis, points), []
        for read in MEASURES.values():
            values = [read(point) for point in points]
            cells.append(f"{exponent(at, values):.2f} ({values[0]:.2f} to {values[-1]:.2f})")
        table.append([axis.name, f"{at[0]:,.0f} to {at[-1]:,.0f}", *cells, axis.expected])
    after = [] if setting.quick else [f"![time and memory against size](../assets/{PICTURE.name})"]
    if not setting.quick:
        draw(measured, PICTURE)
    return Section(
        "Scaling",
        [
            "Fitted exponents: 1 is in proportion, 0 is flat; in brackets the first and the last value. A small model,",
            f"so that fixed costs show; the fastest of {REPEATS} calls. Memory is what updates add to weights and",
            "optimizer.",
        ],
        ("", "varied", *MEASURES, "expected"),
        table,
        after=after,
    )


def sizes_along(axis: Axis, points: Sequence[Point]) -> list[float]:
    """Of models what was counted; else what was varied."""
    if axis.name == MODELS:
        return [point.parameters for point in points]
    return [size for size, _ in axis.sizes]


def draw(measured: Sequence[tuple[Axis, Sequence[Point]]], path: Path) -> None:
    """Both axes logarithmic, one panel an axis."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter, NullFormatter

    figure, panels = pyplot.subplots(2, 3, figsize=(12, 7), layout="constrained")
    for (axis, points), panel in zip(measured, panels.flat, strict=True):
        for name, read in MEASURES.items():
            panel.loglog(sizes_along(axis, points), [read(point) for point in points], "o-", label=name)
        panel.set_title(axis.name)
        panel.set_xticks(sizes_along(axis, points))
        panel.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(True, which="both", alpha=0.3)
    panels.flat[0].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
