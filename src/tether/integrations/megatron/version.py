"""The versions of Megatron-core with which tether was tested."""

from __future__ import annotations

import logging
from importlib.metadata import version
from importlib.util import find_spec

from packaging.version import Version

TESTED = ("0.16.1", "0.19.2")
"""Tested versions; the first one is the last that runs on Python 3.11."""
_log = logging.getLogger(__name__)


def check_version() -> None:
    """Refuse a version older than those in `TESTED`, and warn about any other untested version.

    Raises:
        ValueError: the version is too old, or a package that it imports is missing.
    """
    installed = Version(version("megatron-core"))
    if installed < Version(TESTED[0]):
        raise ValueError(
            f"megatron-core {installed}: tether needs {TESTED[0]} or later. "
            f"Run: pip install 'megatron-core>={TESTED[0]}'."
        )
    if installed >= Version("0.18") and find_spec("triton") is None:
        raise ValueError(
            f"megatron-core {installed}: loads the package triton and does not bring it. Run: pip install triton, or "
            "pip install 'megatron-core<0.18'."
        )
    if str(installed) not in TESTED:
        _log.warning("megatron-core %s was not tested with tether. Those that were: %s", installed, ", ".join(TESTED))
