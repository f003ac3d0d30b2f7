"""The versions of Megatron-core that tether was tested with."""

from __future__ import annotations

import logging
from importlib.metadata import version
from importlib.util import find_spec

from packaging.version import Version

TESTED = ("0.16.1", "0.19.2")
"""The first is the last for Python 3.11."""
_log = logging.getLogger(__name__)


def check_version() -> None:
    """Refuse a version before those of `TESTED`, and log a warning of another one that is not among them.

    Raises:
        ValueError: a version that is too old, or one without a package that it loads.
    """
    found = Version(version("megatron-core"))
    if found < Version(TESTED[0]):
        raise ValueError(
            f"megatron-core {found}: tether needs {TESTED[0]} or later. Run: pip install 'megatron-core>={TESTED[0]}'."
        )
    if found >= Version("0.18") and find_spec("triton") is None:
        raise ValueError(
            f"megatron-core {found}: loads the package triton and does not bring it. Run: pip install triton, or "
            "pip install 'megatron-core<0.18'."
        )
    if str(found) not in TESTED:
        _log.warning("megatron-core %s was not tested with tether. Those that were: %s", found, ", ".join(TESTED))
