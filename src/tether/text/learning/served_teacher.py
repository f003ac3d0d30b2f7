"""A teacher on a server: vLLM's completions route returns the log-prob of each token of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.batch import TrainBatch
from tether.config import RunConfig, reference_models, served_teachers
from tether.runtime.http import check_listening, read_secret
from tether.text.learning.config_distillation import TeacherConfig
from tether.text.learning.losses import PolicyForward, PolicyOutputs
from tether.text.rewards.service.endpoint import Endpoint, EndpointError


@dataclass(frozen=True)
class ServedTeacher:
    """Queries a server for the log-probs of sampled tokens, in place of a reference engine."""

    key: str
    """Configuration key of its address, for messages."""
    endpoint: Endpoint
    model: str
    """Name of the model on the server."""
    max_concurrent: int

    @classmethod
    def from_config(cls, section: str, teacher: TeacherConfig) -> ServedTeacher:
        """Return the teacher of a configuration's `section`.

        Raises:
            ValueError: nothing listens at its address, or its API key is missing.
        """
        key = f"{section}.server_url"
        assert teacher.server_url is not None
        check_listening(teacher.server_url, key)
        secret = read_secret(teacher.api_key_env, f"{section}.api_key_env")
        url = f"{teacher.server_url.rstrip('/')}/v1/completions"
        endpoint = Endpoint(url, secret, teacher.timeout, teacher.attempts)
        return cls(key, endpoint, teacher.served_model or str(teacher.model_path), teacher.max_concurrent)

    def infer(self, batch: TrainBatch, forward: PolicyForward) -> PolicyOutputs:
        """Return the log-probs of the rows as an engine does.

        Raises:
            ValueError: the server returned no valid response for a row.
        """
        assert forward.temperature == 1, "the server computes at a temperature of 1"
        log_probs = torch.zeros(batch.response_mask.shape)
        learned = batch.response_mask.any(dim=-1).nonzero()[:, 0].tolist()
        with ThreadPoolExecutor(self.max_concurrent, thread_name_prefix="teacher") as threads:
            pending = [threads.submit(self._log_probs, batch[row]) for row in learned]
            try:
                for row, values in zip(learned, (future.result() for future in pending), strict=True):
                    log_probs[row, : len(values)] = values
            except EndpointError as error:
                threads.shutdown(wait=False, cancel_futures=True)
                raise ValueError(f"{self.key}: {error}") from None
        return PolicyOutputs(log_probs=log_probs.where(batch.response_mask, 0.0), batch_size=batch.batch_size)

    def _log_probs(self, row: TrainBatch) -> Tensor:
        """Return the log-probs of the response tokens of a row."""
        prompt, length = int(row.prompt_length), int(row.response_length)
        ids = [*row.prompt_ids[:prompt].tolist(), *row.response_ids[:length].tolist()]
        # 0: no alternatives, only the log-prob of each token itself. One token must be sampled; it is ignored.
        body = {"model": self.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        return torch.tensor(self._read(self.endpoint.ask(body), ids)[prompt:])

    def _read(self, answer: object, ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each token; that of the first is 0."""
        match answer:
            case {"choices": [{"prompt_logprobs": [_, *entries]}]} if len(entries) == len(ids) - 1:
                try:
                    pairs = zip(ids[1:], entries, strict=True)
                    return [0.0, *(float(entry[str(id_)]["logprob"]) for id_, entry in pairs)]
                except (KeyError, TypeError, ValueError):
                    pass
        raise EndpointError(
            f"the server at {self.endpoint.url} gave no `prompt_logprobs` of the {len(ids)} tokens, as vLLM does: "
            f"{str(answer)[:200]}"
        )


def build_served_teachers(config: RunConfig) -> dict[str, ServedTeacher]:
    """Return the teachers on servers, by the names of `reference_models`.

    Raises:
        ValueError: nothing listens at an address, or an API key is missing.
    """
    sections = {name: key.removesuffix(".model_path") for name, (key, _) in reference_models(config).items()}
    served = served_teachers(config).items()
    return {name: ServedTeacher.from_config(sections[name], teacher) for name, teacher in served}
