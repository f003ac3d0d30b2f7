"""Runs programs on this machine, one after the other; they are compiled first if the language requires it."""

from __future__ import annotations

from collections.abc import Sequence

from tether.text.rewards.sandbox.judge import Job
from tether.text.rewards.sandbox.languages import BINARY, LANGUAGES
from tether.text.rewards.sandbox.limits import Finished, Program
from tether.text.rewards.sandbox.options import ProgramOptions
from tether.text.rewards.sandbox.run import run


def run_locally(jobs: Sequence[Job], options: ProgramOptions) -> list[Finished]:
    """Run jobs in order, each in a new sandbox, and stop after one that exceeds its time or does not compile.

    Raises:
        SandboxError: a sandbox could not start.
    """
    programs: dict[tuple[str, str], Program | Finished] = {}
    ends: list[Finished] = []
    for job in jobs:
        key = (job.language, job.source)
        if key not in programs:
            programs[key] = _build(job, options)
        program = programs[key]
        if isinstance(program, Finished):
            return [*ends, program]
        ends.append(run(program, job.stdin, options.limits, confined=not options.unconfined))
        if ends[-1].reason == "time":
            break
    return ends


def _build(job: Job, options: ProgramOptions) -> Program | Finished:
    """Compile the program of a job if its language requires it; return the compiler's result if it failed."""
    language = LANGUAGES[job.language]
    source = Program(language.run, {language.file: job.source.encode(errors="replace")})
    if not language.compile:
        return source
    script = '"$@" >&2 && cat ' + BINARY
    compiler = Program(("sh", "-c", script, "sh", *language.compile), source.files)
    compiled = run(compiler, b"", options.compile_limits, confined=not options.unconfined)
    return Program(language.run, {BINARY.rpartition("/")[2]: compiled.stdout}) if compiled.succeeded else compiled
