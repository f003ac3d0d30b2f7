"""The endpoint of a run: starts a program for each row, and passes the calls of the programs to the sampler."""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from tether.batch import Prompt
from tether.integrations import integration
from tether.text.rewards.outcome import plain
from tether.text.turns.config import ENDPOINT_PROGRAM, EndpointConfig
from tether.text.turns.endpoint.chat import Chat
from tether.text.turns.endpoint.episode import AgentEpisode, PendingCall
from tether.text.turns.endpoint.programs import EpisodeResult, EpisodeTask, ProgramPool

_log = logging.getLogger(__name__)

QUIET_SECONDS = 0.05
"""Time without a new call after which the waiting calls are sampled."""


class AgentEndpoint:
    """Plays episodes.

    Args:
        options: the section of the configuration.
        num_workers: maximum number of concurrent programs.
        chat: translates between messages and token ids.

    Raises:
        ValueError: the program cannot be loaded.
    """

    def __init__(self, options: EndpointConfig, *, num_workers: int, chat: Chat) -> None:
        assert options.program is not None
        self.options, self.chat, self._num_workers = options, chat, num_workers
        self._has_warned = False
        self._open: dict[str, AgentEpisode] = {}  # by API key; also read by the server's thread
        self._calls: queue.SimpleQueue[PendingCall] = queue.SimpleQueue()
        self._programs = ProgramPool(options.program, num_workers=num_workers, timeout=options.timeout)
        self._server = integration("agents", "endpoint_server").EndpointServer(
            self._open.get,
            self._calls.put,
            model=options.model,
            max_request_bytes=options.max_request_bytes,
            takes_rewards=options.reward == "program",
        )

    def close(self) -> None:
        """Kill the programs and stop the server."""
        self._programs.close()
        self._server.close()

    def __enter__(self) -> AgentEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def run_episodes(self, prompts: Sequence[Prompt], first_sample: int) -> Iterator[dict[int, AgentEpisode]]:
        """Start a program for each row of a batch, and return the episodes by the index of their program.

        At the end of the context, calls of programs that still run are refused.

        Args:
            prompts: the prompt of each row.
            first_sample: index of the first row in its step.
        """
        episodes = [
            AgentEpisode(row, prompt, first_sample + row, self.options.max_calls) for row, prompt in enumerate(prompts)
        ]
        self._open.update({episode.key: episode for episode in episodes})
        try:
            yield {self._programs.start(self._play(episode)): episode for episode in episodes}
        finally:
            for episode in episodes:
                self.end(episode)

    def _play(self, episode: AgentEpisode) -> EpisodeTask:
        prompt = episode.prompt
        row = {
            "data_source": prompt.data_source,
            "prompt": list(prompt.messages),
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
        }
        no_proxy = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        direct = f"{no_proxy},127.0.0.1" if no_proxy else "127.0.0.1"
        environment = {
            "NO_PROXY": direct,
            "no_proxy": direct,
            "OPENAI_BASE_URL": self._server.url,
            "OPENAI_API_KEY": episode.key,
            "OPENAI_MODEL": self.options.model,
        }
        return EpisodeTask(plain(row), environment)

    def end(self, episode: AgentEpisode) -> None:
        """Refuse all further calls of an episode."""
        episode.is_over = True
        self._open.pop(episode.key, None)

    def calls(self, num_running: int, timeout: float) -> list[PendingCall]:
        """Wait for calls and return them in the order of their rows.

        Calls are collected until every program that can run has made one, or none arrives for `QUIET_SECONDS`, because
        a few large batches are sampled faster than many small ones.

        Args:
            num_running: number of episodes that are not over.
            timeout: maximum seconds to wait for the first call; if none arrives, the result is empty.
        """
        waiting: list[PendingCall] = []
        expected = min(num_running, self._num_workers)
        try:
            while True:
                is_complete = len(waiting) >= expected
                longest_wait = 0.0 if is_complete else QUIET_SECONDS if waiting else timeout
                waiting.append(self._calls.get(timeout=longest_wait))
        except queue.Empty:
            return sorted(waiting, key=lambda call: call.episode.row)

    def pop_finished(self, programs: Collection[int]) -> dict[int, EpisodeResult]:
        """Return the results of those of these programs that have ended.

        Raises:
            WorkersFailed: the processes of programs can no longer be started.
        """
        ended = self._programs.answered() & set(programs)
        results = {program: self._programs.take(program) for program in sorted(ended)}
        left = next((result.left_running for result in results.values() if result.left_running), "")
        if left and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s=%s returned while threads or tasks that it started were running (%s). Each time, its process is "
                "killed with them and another one started, which takes time. Wait for them before the function returns",
                ENDPOINT_PROGRAM,
                self.options.program,
                left,
            )
        return results
