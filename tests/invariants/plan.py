"""The plan of a run: everything that a built run holds, laid out as path -> text.

Two configurations with the same plan do the same. Copies of the configuration itself, which are kept to be logged and
saved, are left out: they would differ with every key, used or not.
"""

import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tether.batch import WeightUpdate
from tether.config import LoadedConfig
from tether.config.schema.section import Section
from tether.distributed import StoredWeights, Transfers
from tether.runtime.ranks import Pool

Plan = dict[str, str]
LEAVES = (type(None), bool, int, float, complex, str, bytes, Path, torch.dtype, torch.device, type, types.ModuleType)


def plan_of(run: Any, loaded: LoadedConfig) -> Plan:
    """Lay out a built run, and what building it set in this process."""
    copies = (run.trainer.persistence.run_yaml, loaded.tree(), run.loaded.tree())
    return dict(_entries("run", run, copies, {})) | {"threads": str(torch.get_num_threads())}


def _entries(
    path: str, value: Any, copies: tuple[str | Mapping[str, Any], ...], seen: dict[int, Any]
) -> Iterator[tuple[str, str]]:
    if isinstance(value, Section | LoadedConfig) or any(type(value) is type(copy) and value == copy for copy in copies):
        return
    if (leaf := _leaf(value)) is not None:
        yield path, leaf
        return
    if id(value) in seen:
        return
    seen[id(value)] = value  # kept alive, or its id would come again
    yield path, type(value).__qualname__
    for name, part in _parts(value):
        yield from _entries(f"{path}.{name}", part, copies, seen)


def _leaf(value: Any) -> str | None:
    if isinstance(value, LEAVES):
        return repr(value)
    if isinstance(value, Tensor) and value.is_meta:
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {value.requires_grad} {hashlib.sha1(content).hexdigest()}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {hashlib.sha1(value.tobytes()).hexdigest()}"
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value by name; of handles of the system (threads, locks, pipes, processes) there are none."""
    if isinstance(value, nn.Module):
        yield from value.state_dict(keep_vars=True).items()
        yield from ((f"{name}:mode", module.training) for name, module in value.named_modules())
        yield from _recomputes(value)
        yield "config", getattr(value, "config", None)
    elif isinstance(value, Mapping):
        yield "keys", [key if isinstance(key, LEAVES) else type(key) for key in value]
        yield from ((f"[{number}]", item) for number, item in enumerate(value.values()))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{number}]", item) for number, item in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from {"func": value.func, "args": value.args, "keywords": value.keywords}.items()
    elif isinstance(value, types.MethodType):
        yield from {"self": value.__self__, "function": value.__func__}.items()
    elif isinstance(value, types.FunctionType):
        yield "name", value.__qualname__
        yield from inspect.getclosurevars(value).nonlocals.items()
    elif type(value).__module__.startswith(("tether.", "torch.optim", "transformers.", "jinja2.", __name__)):
        yield from getattr(value, "__dict__", {}).items()


def _recomputes(model: nn.Module) -> Iterator[tuple[str, bool]]:
    for name, module in model.named_modules():
        yield f"{name}:recomputes", getattr(module, "gradient_checkpointing", False)


class OnRanks:
    """Stands in the place of the processes of several devices: one rank's parts, in this process."""

    def __init__(self, pools: Sequence[Pool], device: str, threads: int, logs: Path, **options: Any) -> None:
        self.size, self.pools, self.options = sum(pool.size for pool in pools), pools, options

    def some(self, ranks: range) -> "OnRanks":
        return self if len(ranks) == self.size else OnRanks([Pool(1, len(ranks))], "cpu", 1, Path())

    def build(self, factory: Callable[..., Mapping[str, Any]], *arguments: Any) -> None:
        self.parts = factory(*arguments)

    def call(self, part: str, method: str, arguments: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        return [getattr(self.parts[part], method)(*given) if given is not None else None for given in arguments]

    @property
    def transfers(self) -> Transfers:
        return Transfers()

    def share_weights(self, part: str) -> Iterator[StoredWeights]:
        yield StoredWeights.of([])

    def read(self, shared: object) -> object:
        return shared

    def close(self) -> None:
        pass


class GivenEngine:
    """Stands in the place of an engine in shards: what it is given."""

    def __init__(self, model: nn.Module, *given: Any, **options: Any) -> None:
        self.model, self.given, self.options = model, given, options

    def export(self) -> WeightUpdate:
        return WeightUpdate(0, [(name, value) for name, value in self.model.state_dict().items() if not value.is_meta])

    def place(self) -> tuple[int, bool]:
        return 0, True

    def described(self) -> str:
        return "an engine"


class Loader:
    """Stands in the place of a function that loads or makes something, and notes what it is asked for.

    That is a part of the plan: it says, for example, whether a model's own code may run. What is slow to load is kept,
    and a copy of it is given where the same is asked for again.
    """

    def __init__(self, load: Callable[..., Any], keep: Callable[[Any], Any] | None) -> None:
        """With `keep`, what was loaded once is given again, each time as `keep` gives it."""
        self.load = load
        self.keep = keep
        self.kept: dict[str, Any] = {}
        self.asked: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        question = f"{self.load.__name__}{args} {kwargs}"
        self.asked.append(question)
        if self.keep is None:
            return self.load(*args, **kwargs)
        if question not in self.kept:
            self.kept[question] = self.load(*args, **kwargs)
        return self.keep(self.kept[question])
