"""Options of rewards that run programs: `reward_model.sandbox` and `reward_model.sandbox_fusion`."""

from __future__ import annotations

from dataclasses import dataclass, field

from tether.runtime.http import check_listening
from tether.text.rewards.sandbox import bubblewrap
from tether.text.rewards.sandbox.languages import check_languages
from tether.text.rewards.sandbox.limits import Limits

COMPILE_SECONDS = 30.0


@dataclass(frozen=True)
class Server:
    """A SandboxFusion server."""

    url: str
    """URL of the server's ``/run_code``."""
    memory_mb: int = 1024
    concurrency: int = 64
    """Maximum number of concurrent requests of a reward process."""


@dataclass(frozen=True)
class ProgramOptions:
    """Options of programs: languages, limits, and the server if there is one."""

    languages: tuple[str, ...] = ("python",)
    max_tests: int = 10
    limits: Limits = field(default_factory=lambda: Limits(seconds=6.0, memory_mb=1024, processes=64))
    unconfined: bool = False
    server: Server | None = None

    @property
    def compile_limits(self) -> Limits:
        """Return the limits of a compiler."""
        # The compiled program is printed, so the limit of files applies to the output.
        return Limits(
            seconds=COMPILE_SECONDS, memory_mb=2048, processes=self.limits.processes, output=self.limits.files
        )

    @property
    def deadline(self) -> float:
        """Return the seconds to score a response if every program uses its entire time."""
        if self.server:
            rounds = -(-self.max_tests // self.server.concurrency)
            return rounds * self.attempts * (self.request_timeout + self.pause)
        each = self.limits.wall_seconds + self.limits.startup
        return self.max_tests * each + 2 * self.compile_limits.wall_seconds

    @property
    def request_timeout(self) -> float:
        """Return the timeout of a request to the server, as in verl."""
        return 2 * self.limits.seconds + 10

    attempts = 3
    """Maximum number of requests for one program; a busy server answers 504."""
    pause = 1.0
    """Seconds between two attempts."""

    def check(self) -> None:
        """Check that programs can run, before anything is loaded.

        Raises:
            ValueError: this machine has no sandbox, a language is not installed, or no server listens.
        """
        self.check_machine()
        if self.server:
            check_listening(self.server.url, "reward_model.sandbox_fusion.url")

    def check_machine(self) -> None:
        """Check languages and sandbox, but not whether the server listens.

        Raises:
            ValueError: this machine has no sandbox, or a language is not installed.
        """
        check_languages(self.languages, remote=self.server is not None)
        if self.server:
            return
        if self.unconfined:
            if reason := bubblewrap.missing_package(("prlimit", "util-linux")):
                raise ValueError(f"reward_model.sandbox.unconfined: {reason}")
        elif reason := bubblewrap.confinement_advice():
            raise ValueError(f"reward_model.sandbox: {reason}")
