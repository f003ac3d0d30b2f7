"""Execution of programs on a SandboxFusion server (github.com/bytedance/SandboxFusion) over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tether.runtime.http import NoAnswer, post_json
from tether.text.rewards.sandbox.judge import Job
from tether.text.rewards.sandbox.languages import LANGUAGES
from tether.text.rewards.sandbox.limits import Finished, SandboxError
from tether.text.rewards.sandbox.options import ProgramOptions, Server

_BUSY = 504


def run_remotely(jobs: Sequence[Job], options: ProgramOptions) -> list[Finished]:
    """Run all jobs on the server, with up to `concurrency` concurrent requests; results are in the order of the jobs.

    Raises:
        SandboxError: the server failed for a job, so the result of its program is unknown.
    """
    assert options.server
    with ThreadPoolExecutor(min(options.server.concurrency, len(jobs))) as pool:
        return list(pool.map(partial(_run, options=options, server=options.server), jobs))


def _run(job: Job, options: ProgramOptions, server: Server) -> Finished:
    body = {
        "compile_timeout": options.limits.seconds,
        "run_timeout": options.limits.seconds,
        "code": job.source,
        "stdin": job.stdin.decode(),
        "memory_limit_MB": server.memory_mb,
        "language": LANGUAGES[job.language].remote,
        "files": {},
        "fetch_files": [],
    }
    start = time.monotonic()
    answer = _post(server.url, body, options)
    return _parse_answer(answer, time.monotonic() - start)


def _post(url: str, body: dict[str, object], options: ProgramOptions) -> object:
    for attempt in range(options.attempts):
        if attempt:
            time.sleep(options.pause)
        try:
            answer = post_json(url, body, {}, options.request_timeout)
        except NoAnswer as error:
            problem = str(error)
            break
        if 200 <= answer.status < 300:
            try:
                return json.loads(answer.body)
            except (ValueError, RecursionError):
                problem = f"an answer that is not JSON: {_beginning(answer.body)}"
                break
        problem = f"HTTP {answer.status} {_beginning(answer.body)}"
        if answer.status != _BUSY:
            break
    raise SandboxError(f"the server at {url} gave {problem}")


def _parse_answer(answer: object, seconds: float) -> Finished:
    """Convert an answer to the result of a program, which may have failed, not compiled, or exceeded its time limit."""
    match answer:
        case {"status": "Success" | "Failed", "run_result": {"status": "TimeLimitExceeded"}}:
            return Finished("time", -1, b"", b"", seconds)
        case {
            "status": "Success" | "Failed",
            "run_result": {"status": "Finished", "return_code": int(code), "stdout": out, "stderr": err},
        } if not isinstance(code, bool) and _is_text(out, err):
            return Finished("exit", code, _bytes(out), _bytes(err), seconds)
        case {
            "status": "Failed",
            "run_result": None,
            "compile_result": {"status": "TimeLimitExceeded", "stderr": err},
        } if _is_text(err):
            return Finished("exit", 1, b"", _bytes(err), seconds)
        case {
            "status": "Failed",
            "run_result": None,
            "compile_result": {"status": "Finished", "return_code": int(code), "stderr": err},
        } if not isinstance(code, bool) and code != 0 and _is_text(err):
            return Finished("exit", 1, b"", _bytes(err), seconds)
    raise SandboxError(f"the server ran no program: {json.dumps(answer)[:500]}")


def _is_text(*printed: object) -> bool:
    # The server sends null for empty output.
    return all(text is None or isinstance(text, str) for text in printed)


def _bytes(printed: str | None) -> bytes:
    try:
        return (printed or "").encode()
    except UnicodeEncodeError as error:
        raise SandboxError("the server returned output with an unpaired surrogate, which is invalid Unicode") from error


def _beginning(body: bytes) -> str:
    return body[:300].decode(errors="replace")
