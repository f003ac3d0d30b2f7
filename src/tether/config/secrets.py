"""Masking of secrets: values whose keys are named like passwords, or like keys and tokens of services."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
_OWNER = "api|access|auth|bearer|client|gh|github|hf|hub|private|refresh|secret|service|session"
_WORD = rf"secret|password|passwd|pwd|credentials?|authorization|(?:{_OWNER})[_-]?(?:key|token)"
_NAME = rf"(?:(?:\w*[_-])?(?:{_WORD})|token)"
_SECRET = re.compile(_NAME, re.IGNORECASE)
_PAIR = re.compile(rf"(?<!\w)({_NAME}[\"']?\s*:\s*)([^,}}]+)", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a key has the name of a secret: ``api_key``, ``HF_TOKEN``, ``clientSecret``; not ``eos_token``."""
    return _SECRET.fullmatch(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)) is not None


def masked(value: object) -> Any:
    """Return a tree of plain values with ``***`` for each string whose key has the name of a secret."""
    if isinstance(value, Mapping):
        return {k: HIDDEN if _hides(k, inner) else masked(inner) for k, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner) for inner in value]
    return value


def has_secrets(value: object) -> bool:
    """Whether `masked` would replace anything."""
    if isinstance(value, Mapping):
        return any(_hides(k, inner) or has_secrets(inner) for k, inner in value.items())
    return isinstance(value, list | tuple) and any(has_secrets(inner) for inner in value)


def masked_command(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command with masked secrets: ``a.b.api_key=***``."""
    return [_masked_argument(argument) for argument in arguments]


def _hides(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, str) and value != "" and is_secret(name)


def _masked_argument(argument: str) -> str:
    key, equals, value = argument.partition("=")
    if equals and is_secret(key.rpartition(".")[2]):
        return f"{key}={HIDDEN}"
    return f"{key}{equals}{_PAIR.sub(lambda pair: pair[1] + HIDDEN, value)}"
