"""Our modules in the place of transformers', before a model is used."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from torch import nn


def replace_modules(model: nn.Module, classes: Container[str], ours: Callable[[Any], nn.Module]) -> None:
    """Put `ours` of a module in its place wherever its class is named in `classes`; train or eval mode stays."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ in classes:
                new = ours(child)
                new.training = child.training
                setattr(parent, name, new)
