"""Requests to ModelScope with its own client (extra ``modelscope``), with a single error type for all its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import requests
from modelscope_hub.errors import HubError

from tether.runtime.disk import of_a_full_disk
from tether.runtime.hubs import refusal

NAME = "ModelScope"


@contextmanager
def asking_modelscope(request: str, fix: str) -> Iterator[None]:
    """Turn errors of ModelScope's client inside the block into a ValueError.

    The arguments are those of `tether.runtime.hugging_face.asking_hugging_face`.

    Raises:
        ValueError: ModelScope does not have it, or cannot be reached.
        OSError: the disk is full or not writable.
    """
    try:
        yield
    except (HubError, requests.RequestException, OSError, ValueError) as error:
        if full := of_a_full_disk(error):
            raise full from None
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise refusal(request, NAME, lines[0], fix) from error
