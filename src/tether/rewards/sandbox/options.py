"""Settings of a run for programs: `reward_model.sandbox` and `reward_model.sandbox_fusion`."""

from __future__ import annotations

from dataclasses import dataclass, field

from tether.rewards.sandbox import bubblewrap
from tether.rewards.sandbox.languages import check_languages
from tether.rewards.sandbox.limits import Limits
from tether.runtime.http import check_listening

COMPILE_SECONDS = 30.0


@dataclass(frozen=True)
class Server:
    """A SandboxFusion server."""

    url: str
    """Its ``/run_code``."""
    memory_mb: int = 1024
    concurrency: int = 64
    """Requests at once that one reward process makes."""


@dataclass(frozen=True)
class ProgramOptions:
    """Where and with which limits programs run."""

    languages: tuple[str, ...] = ("python",)
    max_tests: int = 10
    limits: Limits = field(default_factory=lambda: Limits(seconds=6.0, memory_mb=1024, processes=64))
    unconfined: bool = False
    server: Server | None = None

    @property
    def compile_limits(self) -> Limits:
        """A compiler's limits; it prints the program."""
        return Limits(
            seconds=COMPILE_SECONDS, memory_mb=2048, processes=self.limits.processes, output=self.limits.files
        )

    @property
    def deadline(self) -> float:
        """Seconds that scoring a response can take where every program takes all of its own."""
        if self.server:
            rounds = -(-self.max_tests // self.server.concurrency)
            return rounds * self.attempts * (self.request_timeout + self.pause)
        each = self.limits.wall_seconds + self.limits.startup
        return self.max_tests * each + 2 * self.compile_limits.wall_seconds

    @property
    def request_timeout(self) -> float:
        """Seconds for one request to the server, as in verl: it compiles, runs and may have to wait."""
        return 2 * self.limits.seconds + 10

    attempts = 3
    """Requests for one program: a server that is busy answers 504."""
    pause = 1.0
    """Seconds between two of them."""

    def check(self) -> None:
        """Refuse what could score no program, before anything is loaded.

        Raises:
            ValueError: no sandbox on this machine, a language that is not installed, or no server.
        """
        self.check_machine()
        if self.server:
            check_listening(self.server.url, "reward_model.sandbox_fusion.url")

    def check_machine(self) -> None:
        """The same without a look for the server."""
        check_languages(self.languages, remote=self.server is not None)
        if self.server:
            return
        if self.unconfined:
            if reason := bubblewrap.missing_package(("prlimit", "util-linux")):
                raise ValueError(f"reward_model.sandbox.unconfined: {reason}")
        elif reason := bubblewrap.why_not():
            raise ValueError(f"reward_model.sandbox: {reason}")
