"""Requests to ModelScope with its own client (extra ``modelscope``), with a single error type for all its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import requests
from modelscope_hub.errors import HubError

from tether.runtime.disk import full_disk_error
from tether.runtime.hubs import hub_error

NAME = "ModelScope"


@contextmanager
def modelscope_errors(request: str, fix: str) -> Iterator[None]:
    """Turn errors of ModelScope's client inside the block into a ValueError.

    The arguments are those of `tether.runtime.hugging_face.hugging_face_errors`.

    Raises:
        ValueError: ModelScope does not have it, or cannot be reached.
        OSError: the disk is full or not writable.
    """
    try:
        yield
    except (HubError, requests.RequestException, OSError, ValueError) as error:
        if full := full_disk_error(error):
            raise full from None
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise hub_error(request, NAME, lines[0], fix) from error
