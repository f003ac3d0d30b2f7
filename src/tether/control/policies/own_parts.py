"""User-defined modules of a control policy: how their classes are called, and the features extractor.

A features extractor is a class ``FILE.py:NAME`` whose module replaces the CNN in front of the hidden layers. It is
called with ``shapes`` (field of an observation -> its shape) and those keys of `PASSED_ON` that its signature names.
Its ``forward(fields)`` returns features [B, F], of any width F, for a dict of fields [B, *shape].
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tether.control.policies.spec import Observations, PolicySpec, numbers_of, picture_of
from tether.runtime.user_files import definition

EXTRACTOR_KEY = "policy.features_extractor"
PASSED_ON = ("hidden_dim", "num_layers", "activation")
"""Keys of ``policy`` that a class may request."""
ROWS = 4
"""Number of observations in a test call."""


class OwnFeatures(nn.Module):
    """A user-defined features extractor.

    Args:
        spec: spec of the policy, with a `features_extractor`.
        generator: seeds the initial weights, which are drawn from torch's global generator; its state is restored.

    Raises:
        ValueError: the class does not exist, has other arguments, or does not return features in a test call.
    """

    def __init__(self, spec: PolicySpec, generator: torch.Generator) -> None:
        super().__init__()
        assert spec.features_extractor is not None
        pictures = spec.make_pictures()
        self._numbers = {field.name: field.width for field in spec.parts if spec.is_number(field)}
        self._pictures = {field.name: field.shape[-1] for field in spec.parts if field.name in spec.pictures}
        shapes: dict[str, tuple[int, ...]] = {name: (width,) for name, width in self._numbers.items()}
        if pictures is not None:
            shapes |= {name: (channels, *pictures.shape[1:]) for name, channels in self._pictures.items()}
        seed = int(torch.randint(2**62, (), generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            where = f"{EXTRACTOR_KEY}={spec.features_extractor}"
            self.module = construct(definition(spec.features_extractor, EXTRACTOR_KEY), spec, {"shapes": shapes}, where)
        self.features = self._test_call(shapes, where)
        """F, the number of features."""

    def forward(self, obs: Observations) -> Tensor:
        """Return features [..., F] for normalised flat rows [B, width] and images, bytes [B, C, H, W]."""
        numbers = numbers_of(obs)
        rows = numbers.shape[:-1]
        fields = dict(zip(self._numbers, numbers.flatten(0, -2).split([*self._numbers.values()], dim=-1), strict=True))
        if self._pictures:
            picture = picture_of(obs).flatten(0, -4)
            fields |= dict(zip(self._pictures, picture.split([*self._pictures.values()], dim=1), strict=True))
        features: Tensor = self.module(fields)
        return features.unflatten(0, rows)

    def _test_call(self, shapes: Mapping[str, tuple[int, ...]], where: str) -> int:
        fields = {
            name: torch.zeros(ROWS, *shape, dtype=torch.uint8 if name in self._pictures else torch.float32)
            for name, shape in shapes.items()
        }
        call = f"{where}: a call on {ROWS} observations of {shapes}"
        try:
            features = self.module(fields)
        except Exception as error:  # user code may raise anything
            raise ValueError(f"{call} raised {type(error).__name__}: {error}") from error
        shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != ROWS:
            raise ValueError(f"{call} returned {shape}; expected features [{ROWS}, any width]")
        if not features.isfinite().all():
            raise ValueError(f"{call} returned a number that is not finite")
        return features.shape[1]


def construct(factory: object, spec: PolicySpec, arguments: Mapping[str, object], where: str) -> nn.Module:
    """Create an object of a user-defined class, with these arguments and the keys of `PASSED_ON` that its signature
    names.

    Raises:
        ValueError: the class is not a subclass of ``nn.Module``, or its arguments differ.
    """
    if not callable(factory):
        raise ValueError(f"{where}: is a {type(factory).__name__}; expected a class of torch.nn.Module")
    signature = inspect.signature(factory)
    options = {name: getattr(spec, name) for name in PASSED_ON if name in signature.parameters}
    try:
        signature.bind(**arguments, **options)
    except TypeError as error:
        raise ValueError(
            f"{where}: takes {signature}; expected ({', '.join(arguments)}) and any of {', '.join(PASSED_ON)} ({error})"
        ) from None
    module = factory(**arguments, **options)
    if not isinstance(module, nn.Module):
        raise ValueError(f"{where}: returns {type(module).__name__}; expected a torch.nn.Module")
    return module
