"""The reward of a program: the share of its tests that it passes."""

from __future__ import annotations

from tether.text.rewards.sandbox.cases import StdioTest, parse_tests
from tether.text.rewards.sandbox.fusion import run_remotely
from tether.text.rewards.sandbox.judge import find_answer, job_for, language_of
from tether.text.rewards.sandbox.limits import Finished
from tether.text.rewards.sandbox.local import run_locally
from tether.text.rewards.sandbox.options import ProgramOptions
from tether.types import ExtraInfo


class ProgramReward:
    """A reward function (`tether.text.rewards.router`) that runs the program in a response against the tests of the
    row.
    """

    def __init__(self, options: ProgramOptions) -> None:
        self._options = options

    @property
    def deadline(self) -> float:
        """Return the maximum seconds of a call; each program has its own timeout."""
        return self._options.deadline

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: object, extra_info: ExtraInfo
    ) -> dict[str, object]:
        """Return the share of the first `max_tests` tests that pass as "score", with "acc" (all pass) and "timed_out".

        A response without a program scores 0. If there is no program or it fails, the result has a "reason".

        Raises:
            ValueError: the tests are invalid.
            SandboxError: a sandbox or the server failed.
        """
        tests = parse_tests(ground_truth)[: self._options.max_tests]
        is_called = not isinstance(tests[0], StdioTest)
        languages = ("python",) if is_called else self._options.languages
        answer = find_answer(solution_str, languages, raw=is_called)
        if answer is None:
            reason = self._why_none(solution_str, is_called=is_called)
            return {"score": 0.0, "acc": False, "timed_out": False, "reason": reason}
        jobs = [job_for(test, answer) for test in tests]
        ends = (run_remotely if self._options.server else run_locally)(jobs, self._options)
        passed = sum(end.succeeded and job.passed(end) for job, end in zip(jobs, ends, strict=False))
        timed_out = any(end.reason == "time" for end in ends)
        score: dict[str, object] = {"score": passed / len(tests), "acc": passed == len(tests), "timed_out": timed_out}
        failed = next((end for end in ends if not end.succeeded), None)
        return score | {"reason": _why(failed)} if failed else score

    def _why_none(self, response: str, *, is_called: bool) -> str:
        language = language_of(response)
        if language is None:
            return "the response has no code block"
        if is_called:
            return f"the code block is in {language}, but only functions in Python can be called"
        languages = ", ".join(self._options.languages)
        return f"the code block is in {language}, but reward_model.sandbox.languages has {languages}"


def _why(end: Finished) -> str:
    """Describe how a program failed, with the first error of a compiler, otherwise the last line of stderr."""
    if end.reason != "exit":
        return f"the program exceeded its limit of {end.reason}"
    lines = [line.strip() for line in end.stderr.decode(errors="replace").splitlines() if line.strip()]
    message = next((line for line in lines if "error:" in line), lines[-1] if lines else "")
    return f"the program ended with exit code {end.code}" + (f": {message[:200]}" if message else "")
