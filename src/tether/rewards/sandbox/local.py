"""Programs on this machine: compiled where the language asks for it, and run one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from tether.rewards.sandbox.judge import Job
from tether.rewards.sandbox.languages import BINARY, LANGUAGES
from tether.rewards.sandbox.limits import Finished, Program
from tether.rewards.sandbox.options import ProgramOptions
from tether.rewards.sandbox.run import run


def run_locally(jobs: Sequence[Job], options: ProgramOptions) -> list[Finished]:
    """Run jobs in their order, each in a sandbox of its own; none after one that took too long, or did not compile.

    Raises:
        SandboxError: a sandbox could not be set up.
    """
    programs: dict[tuple[str, str], Program | Finished] = {}
    ends: list[Finished] = []
    for job in jobs:
        key = (job.language, job.source)
        if key not in programs:
            programs[key] = _program(job, options)
        program = programs[key]
        if isinstance(program, Finished):
            return [*ends, program]
        ends.append(run(program, job.stdin, options.limits, confined=not options.unconfined))
        if ends[-1].reason == "time":
            break
    return ends


def _program(job: Job, options: ProgramOptions) -> Program | Finished:
    """The command of a job; or the failure of its compiler."""
    language = LANGUAGES[job.language]
    source = Program(language.run, {language.file: job.source.encode(errors="replace")})
    if not language.compile:
        return source
    script = '"$@" >&2 && cat ' + BINARY
    compiler = Program(("sh", "-c", script, "sh", *language.compile), source.files)
    made = run(compiler, b"", options.compile_limits, confined=not options.unconfined)
    return Program(language.run, {BINARY.rpartition("/")[2]: made.stdout}) if made.succeeded else made
