"""Parts of a control policy that are the user's: how a class of theirs is called, and a features extractor.

A features extractor stands where a CNN would, in front of the hidden layers: a class ``FILE.py:NAME`` that is called
with ``shapes``, part of an observation -> its shape, and those of `PASSED_ON` that its signature names. Its
``forward(parts)`` gives features [B, F] of a dict of parts [B, *shape], F being whatever it likes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tether.models.control.spec import Observations, PolicySpec, numbers_of, picture_of
from tether.runtime.user_files import definition

EXTRACTOR_KEY = "policy.features_extractor"
PASSED_ON = ("hidden_dim", "num_layers", "activation")
"""Keys of ``policy`` that a class may ask for."""
ROWS = 4
"""Observations of a dry call."""


class OwnFeatures(nn.Module):
    """A features extractor of the user's.

    Args:
        spec: the shape; its `features_extractor` is not None.
        generator: of the first weights, which are drawn from torch's global one; that is left as it was.

    Raises:
        ValueError: no such class, it takes other arguments, or a dry call does not give features.
    """

    def __init__(self, spec: PolicySpec, generator: torch.Generator) -> None:
        super().__init__()
        assert spec.features_extractor is not None
        pictures = spec.make_pictures()
        self._numbers = {part.name: part.width for part in spec.parts if spec.is_number(part)}
        self._pictures = {part.name: part.shape[-1] for part in spec.parts if part.name in spec.pictures}
        shapes: dict[str, tuple[int, ...]] = {name: (width,) for name, width in self._numbers.items()}
        if pictures is not None:
            shapes |= {name: (channels, *pictures.shape[1:]) for name, channels in self._pictures.items()}
        seed = int(torch.randint(2**62, (), generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            where = f"{EXTRACTOR_KEY}={spec.features_extractor}"
            self.module = called(definition(spec.features_extractor, EXTRACTOR_KEY), spec, {"shapes": shapes}, where)
        self.features = self._dry_call(shapes, where)
        """F."""

    def forward(self, obs: Observations) -> Tensor:
        """Features [..., F]: of numbers [B, width], normalised and one-hot, and of pictures, bytes [B, C, H, W]."""
        numbers = numbers_of(obs)
        rows = numbers.shape[:-1]
        parts = dict(zip(self._numbers, numbers.flatten(0, -2).split([*self._numbers.values()], dim=-1), strict=True))
        if self._pictures:
            picture = picture_of(obs).flatten(0, -4)
            parts |= dict(zip(self._pictures, picture.split([*self._pictures.values()], dim=1), strict=True))
        features: Tensor = self.module(parts)
        return features.unflatten(0, rows)

    def _dry_call(self, shapes: Mapping[str, tuple[int, ...]], where: str) -> int:
        parts = {
            name: torch.zeros(ROWS, *shape, dtype=torch.uint8 if name in self._pictures else torch.float32)
            for name, shape in shapes.items()
        }
        call = f"{where}: a call on {ROWS} observations of {shapes}"
        try:
            features = self.module(parts)
        except Exception as error:  # whatever a user's module raises on a small batch is one and the same problem
            raise ValueError(f"{call} raised {type(error).__name__}: {error}") from error
        shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != ROWS:
            raise ValueError(f"{call} gave {shape}; expected features [{ROWS}, any width]")
        if not features.isfinite().all():
            raise ValueError(f"{call} gave a number that is not finite")
        return features.shape[1]


def called(found: object, spec: PolicySpec, given: Mapping[str, object], where: str) -> nn.Module:
    """An object of the user's class, made with these arguments and those of `PASSED_ON` that it names.

    Raises:
        ValueError: it is no such class, or takes other arguments.
    """
    if not callable(found):
        raise ValueError(f"{where}: is a {type(found).__name__}; expected a class of torch.nn.Module")
    signature = inspect.signature(found)
    options = {name: getattr(spec, name) for name in PASSED_ON if name in signature.parameters}
    try:
        signature.bind(**given, **options)
    except TypeError as error:
        raise ValueError(
            f"{where}: takes {signature}; expected ({', '.join(given)}) and any of {', '.join(PASSED_ON)} ({error})"
        ) from None
    module = found(**given, **options)
    if not isinstance(module, nn.Module):
        raise ValueError(f"{where}: gives {type(module).__name__}; expected a torch.nn.Module")
    return module
