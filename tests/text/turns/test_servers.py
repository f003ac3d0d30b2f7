"""Conversations by servers of both kinds: every turn is a request, and all of them are one row."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.text.servers.bench import EOS, KEY, PROMPTS, SAMPLING, Bench, bench_of, processes_of, rows_of
from tests.text.servers.bench import VLLM as BY_VLLM
from tests.text.servers.stand_in import environment

pytestmark = pytest.mark.slow

LONGER = replace(SAMPLING, max_new_tokens=32)
TOLD = [200, 201, 202]


@dataclass
class Script:
    """Answers the first two turns of each row."""

    heard: dict[int, list[list[int]]] = field(default_factory=dict)
    count: int = 0

    def submit_turn(self, row: int, token_ids: list[int]) -> None:
        assert [token in EOS for token in token_ids] == [False] * (len(token_ids) - 1) + [True]
        self.heard.setdefault(row, []).append(token_ids)
        self.count += 1

    def wait_reply(self, row: int, room: int) -> list[int] | None:
        return TOLD if len(self.heard[row]) < 3 and room >= len(TOLD) else None


@dataclass
class Kills(Script):
    """Kills the server once some turns were heard."""

    server: Any = None

    def submit_turn(self, row: int, token_ids: list[int]) -> None:
        super().submit_turn(row, token_ids)
        if self.count == 4:
            for process in processes_of(self.server):
                os.kill(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module", params=[*BY_VLLM, "sglang-stand-in"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = bench_of(request.param, tmp_path_factory.mktemp("bench"))
    yield made
    made.close()


def test_turns_and_answers_are_one_row(bench: Bench) -> None:
    script = Script()
    rollout = bench.engine.generate(PROMPTS, LONGER, KEY, responder=script)
    several = 0
    for row, (ids, mask) in enumerate(zip(rows_of(rollout), rollout.response_mask.tolist(), strict=True)):
        ends = [at for at, own in enumerate(mask[: len(ids)]) if own and ids[at] in EOS]
        expected, own = list[int](), list[bool]()
        for turn, said in enumerate(script.heard.get(row, [])):
            answered = TOLD if turn < 2 and len(ids) > len(expected) + len(said) else []
            expected += [*said, *answered]
            own += [True] * len(said) + [False] * len(answered)
        assert ids[: len(expected)] == expected
        assert mask[: len(own)] == own
        assert not any(mask[len(ids) :])
        assert len(ends) <= 3
        several += len(ends) > 1
    assert several
    drawn = rollout.response_mask
    torch.testing.assert_close(
        rollout.rollout_log_probs[drawn], bench.log_probs(rollout, LONGER)[drawn], atol=1e-4, rtol=0
    )
    assert bool((rollout.rollout_log_probs[~drawn] == 0).all())


def test_turns_have_seeds_of_their_own(bench: Bench) -> None:
    """The same request gives the same turn; a further turn is another draw."""
    first, second = (bench.engine.generate(PROMPTS, LONGER, KEY, responder=Script()) for _ in range(2))
    assert rows_of(first) == rows_of(second)
    alone = bench.engine.generate(PROMPTS, LONGER, KEY)
    for whole, one in zip(rows_of(first), rows_of(alone), strict=True):
        assert whole[: len(one)] == one


def test_what_was_kept_is_known_of_sampled_tokens(bench: Bench) -> None:
    rollout = bench.engine.generate(PROMPTS, replace(LONGER, top_k=5), KEY, responder=Script())
    assert rollout.kept is not None
    assert torch.equal(rollout.kept.count > 0, rollout.response_mask)


def test_conversations_go_on_where_a_server_died(tmp_path: Path) -> None:
    """Turns that were heard stay; the one that was being drawn is drawn again, with the same seed."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole, killed = (
        Bench(tmp_path / name, "vllm", environment(tmp_path / name) / "bin/python") for name in ("whole", "killed")
    )
    try:
        expected = whole.engine.generate(PROMPTS, LONGER, KEY, responder=Script())
        script = Kills(server=killed.server)
        found = killed.engine.generate(PROMPTS, LONGER, KEY, responder=script)
    finally:
        whole.close()
        killed.close()
    assert script.count >= 4
    assert rows_of(found) == rows_of(expected)
    assert torch.equal(found.response_mask, expected.response_mask)
