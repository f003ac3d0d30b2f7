"""HTTP requests to a server that scores responses, with a timeout, retries, and an API key that is kept out of
messages."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

from tether.runtime.http import NoAnswer, post_json

_RETRIED = (408, 425, 429)  # in addition to 5xx
_MIN_PAUSE, _MAX_PAUSE = 0.5, 30.0
_SHOWN = 300  # characters of an invalid answer


class EndpointError(Exception):
    """The server returned no valid answer; the message says why."""


@dataclass(frozen=True)
class Endpoint:
    """An address of a server."""

    url: str
    secret: str | None = field(default=None, repr=False)
    """Sent as ``Authorization: Bearer``."""
    timeout: float = 60.0
    """Maximum seconds for an answer, including all attempts and the pauses between them."""
    attempts: int = 4
    """Maximum number of requests for one answer; HTTP 408, 425, 429, 5xx and broken connections are retried."""

    def ask(self, body: object) -> Any:
        """Send a POST request and return the parsed JSON of the answer.

        The pause before a retry doubles from half a second and is multiplied by a random factor between 0.5 and 1; a
        longer Retry-After of the server takes precedence.

        Raises:
            EndpointError: there is no answer within `timeout` and `attempts`, or it is an error or not JSON.
        """
        deadline = time.monotonic() + self.timeout
        headers = {"Authorization": f"Bearer {self.secret}"} if self.secret else {}
        for attempt in range(1, self.attempts + 1):
            retry_after = 0.0
            try:
                answer = post_json(self.url, body, headers, max(deadline - time.monotonic(), 1e-3))
            except NoAnswer as error:
                timed_out = time.monotonic() >= deadline
                hint = f"no answer within {self.timeout:g} s; `timeout` is too short, or the server hangs"
                problem = hint if timed_out else str(error)
            else:
                if 200 <= answer.status < 300:
                    return self._parsed(answer.body)
                problem = f"HTTP {answer.status} {_beginning(answer.body)}"
                if answer.status < 400 and answer.location:
                    problem = (
                        f"HTTP {answer.status} to {answer.location[:_SHOWN]}, which is not followed; name that address"
                    )
                if answer.status not in _RETRIED and answer.status < 500:
                    break
                retry_after = _seconds(answer.retry_after)
                if retry_after > self.timeout:
                    problem += f" and a Retry-After of {retry_after:g} s, more than `timeout`"
            max_pause = min(_MIN_PAUSE * 2 ** (attempt - 1), _MAX_PAUSE)
            pause = max(max_pause * _jitter.uniform(0.5, 1.0), retry_after)
            if attempt == self.attempts or time.monotonic() + pause >= deadline:
                break
            time.sleep(pause)
        attempts = f" (attempt {attempt} of {self.attempts})" if attempt > 1 else ""
        raise self._error(f"{problem}{attempts}")

    def _parsed(self, body: bytes) -> Any:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise self._error(f"an answer that is not JSON: {_beginning(body)}") from None

    def _error(self, problem: str) -> EndpointError:
        if self.secret:
            problem = problem.replace(self.secret, "***")  # some servers repeat an invalid key in their answer
        return EndpointError(f"the server at {self.url} gave {problem}")


_jitter = random.Random()  # separate, because retries must not change the state of the run's generators


def _seconds(retry_after: str | None) -> float:
    """Return the seconds of a Retry-After header; 0 if it is a date or missing."""
    try:
        return max(float(retry_after or 0), 0.0)
    except ValueError:
        return 0.0


def _beginning(body: bytes) -> str:
    return " ".join(body[: 4 * _SHOWN].decode(errors="replace").split())[:_SHOWN]
