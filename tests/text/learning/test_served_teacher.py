"""Log-probs of sampled tokens from a server, against a stand-in that answers as vLLM does."""

import socket

import pytest
import torch

from tests.text.learning.batches import make_batch, make_critic, make_policy
from tests.text.rewards.model_server import KEY, served
from tether.batch import TrainBatch
from tether.text.learning.config_distillation import TeacherConfig
from tether.text.learning.losses import PolicyForward
from tether.text.learning.served_teacher import ServedTeacher

SECTION = "distillation.teacher_models.math"


def teacher(url: str, **settings: object) -> ServedTeacher:
    fields = {"model_path": "large", "server_url": url, "attempts": 1, "timeout": 5.0, **settings}
    return ServedTeacher.from_config(SECTION, TeacherConfig.model_validate(fields))


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    return make_batch(make_policy(num_hidden_layers=1), make_critic())


def test_each_token_has_the_log_prob_that_the_server_gives(batch: TrainBatch) -> None:
    """The stand-in says minus the position of a token, so that a shift by one would show."""
    with served() as server:
        server.log_probs = lambda ids: [-float(position) for position in range(1, len(ids))]
        found = teacher(f"{server.url}/", served_model="math-teacher").infer(batch, PolicyForward()).log_probs
        bodies = server.bodies
    positions = batch.prompt_length[:, None] + torch.arange(batch.response_mask.shape[1])
    assert torch.equal(found, torch.where(batch.response_mask, -positions.float(), 0.0))
    learned = [row for row in range(len(batch)) if batch.response_mask[row].any()]
    expected = [
        [*batch.prompt_ids[row, : batch.prompt_length[row]], *batch.response_ids[row, : batch.response_length[row]]]
        for row in learned
    ]
    assert sorted(body["prompt"] for body in bodies) == sorted([int(id_) for id_ in ids] for ids in expected)
    assert {(body["model"], body["max_tokens"], body["prompt_logprobs"]) for body in bodies} == {("math-teacher", 1, 0)}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'{"choices": [{"prompt_logprobs": null}]}', "gave no `prompt_logprobs` of the"),
        (b'{"choices": [{"prompt_logprobs": [null, {"1": {"logprob": -1}}]}]}', "gave no `prompt_logprobs` of the"),
        (b"<html>", "an answer that is not JSON"),
    ],
)
def test_an_answer_without_log_probs_ends_the_step(batch: TrainBatch, answer: bytes, message: str) -> None:
    with served() as server:
        server.raw = answer
        with pytest.raises(ValueError, match=f"^{SECTION}.server_url: the server at {server.url}.* {message}"):
            teacher(server.url).infer(batch, PolicyForward())


def test_a_busy_server_is_asked_again_and_a_key_is_never_shown(
    batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served() as server:
        server.failures = [(503, {})]
        found = teacher(server.url, attempts=2).infer(batch[:1], PolicyForward()).log_probs
        assert torch.equal(found, torch.where(batch.response_mask[:1], -0.5, 0.0))
        server.wants_key = True
        monkeypatch.setenv("TEACHER_KEY", KEY)
        keyed = teacher(server.url, api_key_env="TEACHER_KEY")
        assert torch.equal(keyed.infer(batch[:1], PolicyForward()).log_probs, found)
        assert KEY not in repr(keyed)
        with pytest.raises(ValueError, match="Incorrect API key"):
            teacher(server.url).infer(batch, PolicyForward())


def test_an_address_without_a_server_is_refused_before_the_run() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ValueError, match=f"^{SECTION}.server_url: nothing answers at http://127.0.0.1:{port}"):
        teacher(f"http://127.0.0.1:{port}")
