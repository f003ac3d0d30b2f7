"""Requests to the Hugging Face hub, with a single error type for everything that its client raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tether.runtime.disk import full_disk_error
from tether.runtime.hubs import hub_error

NAME = "the Hugging Face hub"


@contextmanager
def hugging_face_errors(request: str, fix: str) -> Iterator[None]:
    """Turn errors of the hub's client inside the block into a ValueError.

    Args:
        request: start of the message: what is requested, and where else it was searched.
        fix: end of the message: what the user can do.

    Raises:
        ValueError: the hub does not have it, refuses the request or cannot be reached, or HF_HUB_OFFLINE is set.
        OSError: the disk is full or not writable.
    """
    try:
        yield
    except RevisionNotFoundError as error:
        raise hub_error(
            request, NAME, "it has no such revision", f"correct the commit, branch or tag, or {fix}"
        ) from error
    except GatedRepoError as error:
        raise hub_error(
            request, NAME, "its owner asks for a login", f"ask for access and set HF_TOKEN, or {fix}"
        ) from error
    except RepositoryNotFoundError as error:
        why = "there is none of that name, or it is private"
        raise hub_error(request, NAME, why, f"correct the name or set HF_TOKEN, or {fix}") from error
    except HfHubHTTPError as error:
        lines = [
            line for line in str(error).splitlines() if line.strip() and not line.startswith("For more information")
        ]
        raise hub_error(request, NAME, " ".join(lines[:2]) or type(error).__name__, fix) from error
    except HFValidationError as error:
        raise hub_error(request, NAME, str(error), f"correct the name, or {fix}") from error
    except OfflineModeIsEnabled as error:
        raise hub_error(request, NAME, "HF_HUB_OFFLINE is set", f"unset it, or {fix}") from error
    except Exception as error:  # raised by the HTTP client of the installed huggingface_hub
        if full := full_disk_error(error):
            raise full from None
        why = f"{constants.ENDPOINT} cannot be reached: {type(error).__name__}: {error}"
        raise hub_error(request, NAME, why, fix) from error
