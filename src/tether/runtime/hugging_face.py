"""The Hugging Face hub asked for something: one error, whatever its client raises."""

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

from tether.runtime.disk import of_a_full_disk
from tether.runtime.hubs import refusal

NAME = "the Hugging Face hub"


@contextmanager
def asking_hugging_face(asked: str, fix: str) -> Iterator[None]:
    """Ask the hub inside the block.

    Args:
        asked: what is asked for, and what was looked for before; begins the message.
        fix: what to do; ends it.

    Raises:
        ValueError: the hub does not have it or does not give it, cannot be reached, or HF_HUB_OFFLINE is set.
        OSError: the disk is full, or cannot be written to.
    """
    try:
        yield
    except RevisionNotFoundError as error:
        raise refusal(asked, NAME, "it has no such revision", f"correct the commit, branch or tag, or {fix}") from error
    except GatedRepoError as error:
        raise refusal(
            asked, NAME, "its owner asks for a login", f"ask for access and set HF_TOKEN, or {fix}"
        ) from error
    except RepositoryNotFoundError as error:
        why = "there is none of that name, or it is private"
        raise refusal(asked, NAME, why, f"correct the name or set HF_TOKEN, or {fix}") from error
    except HfHubHTTPError as error:
        lines = [
            line for line in str(error).splitlines() if line.strip() and not line.startswith("For more information")
        ]
        raise refusal(asked, NAME, " ".join(lines[:2]) or type(error).__name__, fix) from error
    except HFValidationError as error:
        raise refusal(asked, NAME, str(error), f"correct the name, or {fix}") from error
    except OfflineModeIsEnabled as error:
        raise refusal(asked, NAME, "HF_HUB_OFFLINE is set", f"unset it, or {fix}") from error
    except Exception as error:  # of whichever HTTP client the installed huggingface_hub uses
        if full := of_a_full_disk(error):
            raise full from None
        why = f"{constants.ENDPOINT} cannot be reached: {type(error).__name__}: {error}"
        raise refusal(asked, NAME, why, fix) from error
