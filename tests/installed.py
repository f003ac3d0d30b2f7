"""Packages that a machine may lack. Of one that is there, a test that cannot import it fails; it is not skipped."""

from importlib.metadata import PackageNotFoundError, version

import pytest


def is_installed(distribution: str) -> bool:
    """Whether it is there, by its metadata: nothing of it is imported."""
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


HAS_MEGATRON = is_installed("megatron-core")
WITHOUT_MEGATRON = "needs megatron-core: pip install -e '.[megatron]'"
needs_megatron = pytest.mark.skipif(not HAS_MEGATRON, reason=WITHOUT_MEGATRON)
