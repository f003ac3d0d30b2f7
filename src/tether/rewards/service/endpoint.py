"""A server that scores or judges over HTTP: requests with a deadline, retries and a key that nothing shows."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

from tether.runtime.http import NoAnswer, post_json

_TRY_AGAIN = (408, 425, 429)  # and whatever is the server's own failure
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_SHOWN = 300  # characters of an answer that is none


class EndpointError(Exception):
    """The server gave no answer that can be used, and why."""


@dataclass(frozen=True)
class Endpoint:
    """One address of a server."""

    url: str
    secret: str | None = field(default=None, repr=False)
    """Sent as ``Authorization: Bearer``."""
    timeout: float = 60.0
    """Seconds from a request to its answer, all attempts and the pauses between them included."""
    attempts: int = 4
    """Requests for one answer: HTTP 408, 425, 429 and 5xx, and connections that break, are tried again."""

    def ask(self, body: object) -> Any:
        """The answer to a POST, parsed.

        Pauses double from half a second, and are drawn between half and all of it; a server's Retry-After counts where
        it is longer.

        Raises:
            EndpointError: there is none within `timeout` and `attempts`, it is a refusal, or it is no JSON.
        """
        until = time.monotonic() + self.timeout
        headers = {"Authorization": f"Bearer {self.secret}"} if self.secret else {}
        for attempt in range(1, self.attempts + 1):
            asked = 0.0
            try:
                answer = post_json(self.url, body, headers, max(until - time.monotonic(), 1e-3))
            except NoAnswer as error:
                late = time.monotonic() >= until
                hint = f"no answer within {self.timeout:g} s; `timeout` is too short, or the server hangs"
                problem = hint if late else str(error)
            else:
                if 200 <= answer.status < 300:
                    return self._parsed(answer.body)
                problem = f"HTTP {answer.status} {_beginning(answer.body)}"
                if answer.status < 400 and answer.location:
                    problem = (
                        f"HTTP {answer.status} to {answer.location[:_SHOWN]}, which is not followed; name that address"
                    )
                if answer.status not in _TRY_AGAIN and answer.status < 500:
                    break
                asked = _seconds(answer.retry_after)
                if asked > self.timeout:
                    problem += f" and a Retry-After of {asked:g} s, beyond `timeout`"
            longest = min(_FIRST_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE)
            pause = max(longest * _jitter.uniform(0.5, 1.0), asked)
            if attempt == self.attempts or time.monotonic() + pause >= until:
                break
            time.sleep(pause)
        tried = f" (attempt {attempt} of {self.attempts})" if attempt > 1 else ""
        raise self._error(f"{problem}{tried}")

    def _parsed(self, body: bytes) -> Any:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise self._error(f"an answer that is no JSON: {_beginning(body)}") from None

    def _error(self, problem: str) -> EndpointError:
        if self.secret:
            problem = problem.replace(self.secret, "***")  # some servers repeat a key that they refuse
        return EndpointError(f"the server at {self.url} gave {problem}")


_jitter = random.Random()  # its own: the generators of the run belong to the run


def _seconds(retry_after: str | None) -> float:
    """Of a Retry-After header; 0 where it is a date, or missing."""
    try:
        return max(float(retry_after or 0), 0.0)
    except ValueError:
        return 0.0


def _beginning(body: bytes) -> str:
    return " ".join(body[: 4 * _SHOWN].decode(errors="replace").split())[:_SHOWN]
