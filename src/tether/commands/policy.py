"""Inference with a trained policy: responses of a language model, actions of a control policy."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.checkpoints import find_checkpoint, run_of
from tether.config import LoadedConfig, RunConfig, load_config, values_of
from tether.loop.engine import explain_out_of_memory
from tether.runtime.disk import ANOTHER_CHECKPOINT, read_json, reading
from tether.runtime.objects import is_object, register_objects
from tether.text.data.prompts import decode
from tether.text.sampling.protocol import NoiseKey, SamplingParams
from tether.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tether.control.collecting.agent import EnvAgent
    from tether.control.envs.gymnasium_types import Env
    from tether.text.sampling.build import Encode
    from tether.text.sampling.engine import NativeEngine


@dataclass(frozen=True)
class Response:
    """A response of a language model."""

    prompt: int
    """Index of the prompt."""
    text: str
    """Text of the response without special tokens."""
    token_ids: list[int] = field(repr=False)
    log_probs: list[float] = field(repr=False)
    """Log-probability of each token under the distribution that it was sampled from."""
    truncated: bool
    """Whether the response was cut at max_new_tokens before it ended."""


class Policy:
    """A trained policy: a language model with `generate`, or a control policy with `predict`.

    Args:
        text: result of `tether.text.sampling.build.build_generator`; None: this is a control policy.
        control: result of `tether.control.build.build_agent`; None: this is a language model.
    """

    def __init__(
        self,
        text: tuple[NativeEngine, PreTrainedTokenizerBase, Encode] | None,
        control: tuple[EnvAgent, Callable[[], Env]] | None = None,
    ) -> None:
        self._text, self._control = text, control

    @explain_out_of_memory()
    def generate(
        self,
        prompts: str | Sequence[object],
        *,
        n: int = 1,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = -1,
        stop: str | Sequence[str] = (),
        system: str | None = None,
        seed: int = 1,
    ) -> list[Response]:
        """Sample responses to prompts; they are ordered by prompt, with the n responses to a prompt next to each other.

        Args:
            prompts: one or several prompts; each is a string, which becomes a user message, or a list of
                {role, content}. The chat template is that of training.
            n: responses per prompt.
            max_new_tokens: maximum number of tokens of a response.
            temperature: sampling temperature; 0 is greedy.
            top_p: sample from the smallest set of tokens whose total probability reaches this.
            top_k: sample from the k most likely tokens; -1: from all.
            stop: strings before which a response ends.
            system: a system message before every prompt.
            seed: seed of the sampling; equal seeds give equal responses.

        Raises:
            ValueError: this is a control policy; there is no prompt, or one is invalid or too long for the model; or
                memory ran out.
        """
        if self._text is None:
            raise ValueError("generate: this is a control policy; use predict(observation)")
        for name, value, minimum in (
            ("n", n, 1),
            ("max_new_tokens", max_new_tokens, 1),
            ("temperature", temperature, 0),
            ("top_k", top_k, -1),
        ):
            if not minimum <= value < math.inf:
                raise ValueError(f"{name}={value}: give {minimum} or more")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p}: give more than 0 and at most 1, which keeps all tokens")
        stops = [stop] if isinstance(stop, str) else list(stop)
        if not all(stops):
            raise ValueError("stop: a text is empty; leave it out")
        engine, tokenizer, encode = self._text
        before = [{"role": "system", "content": system}] if system else []
        ids = [encode([*before, *_messages(prompt, index)]) for index, prompt in enumerate(_as_list(prompts))]
        _check_room(ids, max_new_tokens, engine.context)
        sampling = SamplingParams(max_new_tokens, n, temperature, top_k, top_p, record_kept=False)
        batch = engine.generate(ids, sampling, NoiseKey(seed, step=0))
        responses = []
        for row, length in enumerate(batch.response_length.tolist()):
            tokens = batch.response_ids[row, :length].tolist()
            tokens, text, is_stopped = _cut_at_stop(stops, tokenizer, tokens)
            log_probs = batch.rollout_log_probs[row, : len(tokens)].tolist()
            is_truncated = bool(batch.truncated[row]) and not is_stopped
            responses.append(Response(row // n, text, tokens, log_probs, is_truncated))
        return responses

    def predict(self, observation: Any, *, deterministic: bool = True, begins: bool | Sequence[bool] = False) -> Any:
        """Return the next action in the environment's action space.

        Args:
            observation: an observation of the environment; or a batch, whose arrays (all of them in a Dict or Tuple
                space) have an additional first axis, for one action per row.
            deterministic: whether to return the most likely action instead of a sample.
            begins: whether this observation begins an episode; for a batch also one flag per row. This matters for
                policies with a memory or with action chunks.

        Raises:
            ValueError: this is a language model; or the observation does not fit the environment's space.
        """
        return self._require_control("predict")[0].predict(observation, deterministic=deterministic, begins=begins)

    def reset(self) -> None:
        """Begin a new episode in every row; a control policy with a memory clears it."""
        self._require_control("reset")[0].reset()

    def make_env(self) -> Env:
        """Return a `gymnasium.Env` with the wrappers of the policy's evaluation."""
        return self._require_control("make_env")[1]()

    def _require_control(self, method: str) -> tuple[EnvAgent, Callable[[], Env]]:
        if self._control is None:
            raise ValueError(f"{method}: this is a language model; use generate(prompts)")
        return self._control


@explain_out_of_memory()
def load(
    folder: Path | str,
    *,
    env: Callable[..., object] | None = None,
    policy: object = None,
    seed: int = 0,
    num_threads: int | None = None,
    trust_remote_code: bool = False,
) -> Policy:
    """Load the policy of a checkpoint; a language model computes in ``actor_rollout_ref.rollout.dtype`` of its run.

    Args:
        folder: a ``global_step_N`` folder, or the folder of a run (its last checkpoint); for a language model also a
            model's directory, a GGUF file, a known name or a hub id, as for ``tether generate``.
        env: the argument `env` that was passed to `tether.train`, if any; only `Policy.make_env` needs it.
        policy: the argument `policy` that was passed to `tether.train`, if any.
        seed: seed for actions that a control policy samples with ``deterministic=False``.
        num_threads: CPU threads of torch in this process; None: ``trainer.num_threads`` of the run, else
            ``OMP_NUM_THREADS``, else one per core that this process may use.
        trust_remote_code: whether to run Python code from a language model's repository; always true if the training
            had ``actor_rollout_ref.model.trust_remote_code=True``.

    Raises:
        ValueError: there is no checkpoint, num_threads is below 1, or memory ran out.
        CheckpointDamaged: a file of the checkpoint has changed since it was saved.
    """
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads={num_threads}: give 1 or more, or leave it out")
    folder = Path(folder).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file():
        generator = _generator()(str(folder), num_threads=num_threads, trust_remote_code=trust_remote_code)
        return Policy(generator)
    checkpoint = checkpoint_at(folder)
    overrides = [] if num_threads is None else [f"trainer.num_threads={num_threads}"]
    config = load_saved(checkpoint, overrides).config
    if config.env.train.id is None:
        _check_class(checkpoint, config.actor_rollout_ref.model.path)
        data, threads = config.data, config.trainer.num_threads
        trusted = trust_remote_code or config.actor_rollout_ref.model.trust_remote_code
        generator = _generator()(
            checkpoint / "actor",
            data.chat_template,
            data.apply_chat_template_kwargs,
            template_date=data.chat_template_date,
            dtype=config.actor_rollout_ref.rollout.dtype,
            num_threads=threads,
            trust_remote_code=trusted,
        )
        return Policy(generator)
    build_agent = importlib.import_module("tether.control.build").build_agent
    objects = {name: value for name, value in {"env": env, "policy": policy}.items() if value is not None}
    with register_objects(objects):
        agent, make_env = build_agent(config, checkpoint, seed)

    def make_env_again() -> Env:
        with register_objects(objects):
            return make_env()

    return Policy(None, (agent, make_env_again))


def _generator() -> Callable[..., Any]:
    # Imported only if needed, because the modules for one kind of policy are slow to import for the other.
    build: Callable[..., Any] = importlib.import_module("tether.text.sampling.build").build_generator
    return build


def _check_class(checkpoint: Path, model: str) -> None:
    """Refuse a model whose class was defined by the user, because transformers would load another class."""
    file = checkpoint / "actor" / "config.json"
    with reading(file, ANOTHER_CHECKPOINT):
        name = str(read_json(file, dict, ANOTHER_CHECKPOINT)["architectures"][0])
    if is_object(model) and not hasattr(importlib.import_module("transformers"), name):
        raise ValueError(
            f"{checkpoint}: the model is of your own class; load it with {name}.from_pretrained('.../actor')"
        )


def checkpoint_at(path: Path) -> Path:
    """Find and verify the checkpoint at a path; for the folder of a run, its last one.

    Raises:
        ValueError: there is no checkpoint.
        CheckpointDamaged: a file of the checkpoint has changed since it was saved.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        raise ValueError(f"{path}: no checkpoint here; give a global_step_N folder or the folder of a run")
    return checkpoint


def load_saved(checkpoint: Path, overrides: Sequence[str]) -> LoadedConfig:
    """Load the configuration of a checkpoint.

    Relative paths in it, such as those of the data, refer to the folder in which the run was started. If that folder
    can be inferred from the run's folder, files that only exist there are found from any working directory.
    """
    saved, loaded = (load_config(checkpoint / "run.yaml", more) for more in ([], overrides))
    started_in = started_folder(saved.config, run_of(checkpoint.absolute()))
    if started_in is None:
        return loaded
    values = {key: value for key, value in values_of(loaded.config).items() if loaded.sources[key] != "command line"}
    return loaded.with_values(moved_files(values, started_in), str(started_in))


def started_folder(config: RunConfig, run: Path) -> Path | None:
    """Return the folder in which a run was started, inferred from the absolute path of the run's folder, or None."""
    folder = Path(config.trainer.default_local_dir)
    if folder.is_absolute() or run.parts[-len(folder.parts) :] != folder.parts:
        return None
    return run.parents[len(folder.parts) - 1]


def moved_files(values: Mapping[str, Any], started_in: Path) -> dict[str, Any]:
    """Return the values of a configuration that name files which only exist in the folder where the run was started,
    with their paths there."""
    moved = {key: _in_folder(started_in, value) for key, value in values.items()}
    return {key: value for key, value in moved.items() if value != values[key]}


def _in_folder(folder: Path, value: Any) -> Any:
    """Prefix file names that only exist in `folder` with it (``a.jsonl?question=q``, ``a.py:NAME``)."""
    if isinstance(value, Mapping):
        return {key: _in_folder(folder, inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_in_folder(folder, inner) for inner in value)
    name = re.split(r"\?|:\w+$", value)[0] if isinstance(value, str) else ""
    is_in_folder = Path(name).suffix != "" and not Path(name).exists() and (folder / name).is_file()
    return f"{folder}/{value}" if is_in_folder else value


def _as_list(prompts: str | Sequence[object]) -> list[object]:
    """Convert one or several prompts to a list."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Mapping)):
        return [prompts]
    return list(prompts)


def _check_room(prompts: Sequence[Sequence[int]], max_new_tokens: int, context: int | None) -> None:
    for index, ids in enumerate(prompts):
        if context is not None and len(ids) + max_new_tokens > context:
            raise ValueError(
                f"prompts[{index}]: its {len(ids)} tokens and max_new_tokens={max_new_tokens} exceed the model's "
                f"context of {context} tokens. Lower max_new_tokens (--max-new-tokens), or shorten the prompt"
            )


def _cut_at_stop(
    stops: Sequence[str], tokenizer: PreTrainedTokenizerBase, tokens: list[int]
) -> tuple[list[int], str, bool]:
    """Cut a response at the first stop text.

    Returns:
        The tokens up to the one that completes the stop text, the text before the stop text, and whether one was found.
    """
    text = decode(tokenizer, tokens, skip_special_tokens=True)
    positions = [position for stop in stops if (position := text.find(stop)) >= 0]
    if not positions:
        return tokens, text, False
    count = next(
        count
        for count in range(1, len(tokens) + 1)
        if any(stop in decode(tokenizer, tokens[:count], skip_special_tokens=True) for stop in stops)
    )
    return tokens[:count], text[: min(positions)], True


def _messages(prompt: Any, index: int) -> list[Message]:
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}]
    is_valid = isinstance(prompt, Sequence) and all(
        isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in prompt
    )
    if not is_valid or not prompt:
        raise ValueError(
            f"prompts[{index}]: {prompt!r:.80} is not a prompt; give a text, or a list of {{role, content}}"
        )
    return list(prompt)
