"""A trained policy, to be asked: responses of a language model, actions of a control policy."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.checkpoints import find_checkpoint, run_of
from tether.config import LoadedConfig, load_config, values_of
from tether.data.chat import decode
from tether.rollout import NoiseKey, SamplingParams
from tether.runtime.disk import ANOTHER_CHECKPOINT, read_json, reading
from tether.runtime.objects import holding, is_object
from tether.training import named_out_of_memory
from tether.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tether.assembly.generator import Encode
    from tether.envs.gymnasium_types import Env
    from tether.rollout.env.agent import EnvAgent
    from tether.rollout.native import NativeEngine


@dataclass(frozen=True)
class Response:
    """One answer of a language model."""

    prompt: int
    """Number of the prompt that it answers."""
    text: str
    """Without special tokens."""
    token_ids: list[int] = field(repr=False)
    log_probs: list[float] = field(repr=False)
    """Of each token, under the distribution that it was drawn from."""
    truncated: bool
    """It was cut at max_new_tokens: it did not end by itself."""


class Policy:
    """A policy to be asked: `generate` of a language model, `predict` of a control policy; the other one raises.

    Args:
        text: what `tether.assembly.generator.build_generator` gives; None: this is a control policy.
        control: what `tether.assembly.agent.build_agent` gives; None: this is a language model.
    """

    def __init__(
        self,
        text: tuple[NativeEngine, PreTrainedTokenizerBase, Encode] | None,
        control: tuple[EnvAgent, Callable[[], Env]] | None = None,
    ) -> None:
        self._text, self._control = text, control

    @named_out_of_memory()
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
        """Responses to prompts, in their order, the n of a prompt side by side.

        Args:
            prompts: one or several; each a string, which is a user message, or a list of {role, content}. The chat
                template is that of training.
            n: responses a prompt.
            max_new_tokens: tokens of a response at most.
            temperature: 0 is greedy.
            top_p: keep the smallest set of tokens whose mass reaches this.
            top_k: keep the k most likely tokens; -1 keeps all.
            stop: texts before which a response ends.
            system: a system message in front of every prompt.
            seed: of the draws; equal seeds give equal responses.

        Raises:
            ValueError: this is a control policy; no prompt, one that is neither, or one too long for the model; or
                memory ran out.
        """
        if self._text is None:
            raise ValueError("generate: this is a control policy; ask it with predict(observation)")
        for name, value, lowest in (
            ("n", n, 1),
            ("max_new_tokens", max_new_tokens, 1),
            ("temperature", temperature, 0),
            ("top_k", top_k, -1),
        ):
            if not lowest <= value < math.inf:
                raise ValueError(f"{name}={value}: give {lowest} or more")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p}: give more than 0 and at most 1, which keeps all tokens")
        stops = [stop] if isinstance(stop, str) else list(stop)
        if not all(stops):
            raise ValueError("stop: a text is empty; leave it out")
        engine, tokenizer, encode = self._text
        before = [{"role": "system", "content": system}] if system else []
        ids = [encode([*before, *_messages(prompt, number)]) for number, prompt in enumerate(_several(prompts))]
        _check_room(ids, max_new_tokens, engine.context)
        sampling = SamplingParams(max_new_tokens, n, temperature, top_k, top_p, record_kept=False)
        batch = engine.generate(ids, sampling, NoiseKey(seed, step=0))
        responses = []
        for row, length in enumerate(batch.response_length.tolist()):
            tokens = batch.response_ids[row, :length].tolist()
            tokens, text, is_stopped = _until(stops, tokenizer, tokens)
            log_probs = batch.rollout_log_probs[row, : len(tokens)].tolist()
            is_truncated = bool(batch.truncated[row]) and not is_stopped
            responses.append(Response(row // n, text, tokens, log_probs, is_truncated))
        return responses

    def predict(self, observation: Any, *, deterministic: bool = True, begins: bool | Sequence[bool] = False) -> Any:
        """The next action, as the environment takes it.

        Args:
            observation: of one environment, as it gives it; or a batch (arrays with one more axis in front, for Dict
                and Tuple spaces in each part), for an action of each row.
            deterministic: the likeliest action; else one is drawn.
            begins: an episode begins with this observation; for a batch also one flag a row. It matters to policies
                with a memory or with action chunks.

        Raises:
            ValueError: this is a language model; or the observation does not fit the environment's space.
        """
        return self._of_control("predict")[0].predict(observation, deterministic=deterministic, begins=begins)

    def reset(self) -> None:
        """Begin new episodes everywhere: a control policy with a memory forgets what it saw."""
        self._of_control("reset")[0].reset()

    def make_env(self) -> Env:
        """A `gymnasium.Env` as the policy was tested in it, with its wrappers."""
        return self._of_control("make_env")[1]()

    def _of_control(self, method: str) -> tuple[EnvAgent, Callable[[], Env]]:
        if self._control is None:
            raise ValueError(f"{method}: this is a language model; ask it with generate(prompts)")
        return self._control


@named_out_of_memory()
def load(
    folder: Path | str,
    *,
    env: Callable[..., object] | None = None,
    policy: object = None,
    seed: int = 0,
    num_threads: int | None = None,
    trust_remote_code: bool = False,
) -> Policy:
    """The policy of a checkpoint, to be asked.

    Args:
        folder: a ``global_step_N`` folder, or that of a run (its last one); for a language model also what
            ``tether generate`` takes: a model's directory, a GGUF file, a known name or a hub id.
        env: what `tether.train` was given as `env`, if it was.
        policy: what `tether.train` was given as `policy`, if it was.
        seed: of the actions that a control policy draws with ``deterministic=False``.
        num_threads: CPU threads of torch in this process; None: ``trainer.num_threads`` of the run, else
            ``OMP_NUM_THREADS``, else one per core that this process may use.
        trust_remote_code: run Python that a language model's author ships with it; a run that was trained with
            ``actor_rollout_ref.model.trust_remote_code=True`` trusts it already.

    Raises:
        ValueError: there is none, its environment needs what is not installed, num_threads is below 1, or memory ran
            out.
        CheckpointDamaged: a file of it is not what was saved.
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
        template = data.chat_template, data.apply_chat_template_kwargs
        trusted = trust_remote_code or config.actor_rollout_ref.model.trust_remote_code
        options = {"template_date": data.chat_template_date, "num_threads": threads, "trust_remote_code": trusted}
        return Policy(_generator()(checkpoint / "actor", *template, **options))
    build_agent = importlib.import_module("tether.assembly.agent").build_agent
    objects = {name: one for name, one in {"env": env, "policy": policy}.items() if one is not None}
    with holding(objects):
        agent, make_env = build_agent(config, checkpoint, seed)

    def make_env_again() -> Env:
        with holding(objects):
            return make_env()

    return Policy(None, (agent, make_env_again))


def _generator() -> Callable[..., Any]:
    """Imported where it is needed, as is `build_agent`: each loads what the other kind of policy waits for in vain."""
    build: Callable[..., Any] = importlib.import_module("tether.assembly.generator").build_generator
    return build


def _check_class(checkpoint: Path, model: str) -> None:
    """Refuse what transformers would load as another class than it was trained as."""
    file = checkpoint / "actor" / "config.json"
    with reading(file, ANOTHER_CHECKPOINT):
        name = str(read_json(file, dict, ANOTHER_CHECKPOINT)["architectures"][0])
    if is_object(model) and not hasattr(importlib.import_module("transformers"), name):
        raise ValueError(f"{checkpoint}: a model of your own class; load it with {name}.from_pretrained('.../actor')")


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that a path names, verified; of a run's folder, its last one.

    Raises:
        ValueError: there is none.
        CheckpointDamaged: a file of it is not what was saved.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        raise ValueError(f"{path}: no checkpoint here; give a global_step_N folder or the folder of a run")
    return checkpoint


def load_saved(checkpoint: Path, overrides: Sequence[str]) -> LoadedConfig:
    """Load the configuration of a checkpoint.

    A relative path in it, such as that of the data, is one of the folder in which the run was started. Where the run's
    folder tells which that is, files that are only there are found from any other folder.
    """
    saved, loaded = (load_config(checkpoint / "run.yaml", more) for more in ([], overrides))
    folder, run = Path(saved.config.trainer.default_local_dir), run_of(checkpoint.absolute())
    if folder.is_absolute() or run.parts[-len(folder.parts) :] != folder.parts:
        return loaded
    started_in = run.parents[len(folder.parts) - 1]
    values = {key: value for key, value in values_of(loaded.config).items() if loaded.sources[key] != "command line"}
    moved = {key: _in_folder(started_in, value) for key, value in values.items()}
    return loaded.with_values({key: value for key, value in moved.items() if value != values[key]}, str(started_in))


def _in_folder(folder: Path, value: Any) -> Any:
    """Put `folder` before each file name that exists only there (``a.jsonl?question=q``, ``a.py:NAME``)."""
    if isinstance(value, Mapping):
        return {key: _in_folder(folder, inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_in_folder(folder, inner) for inner in value)
    name = re.split(r"\?|:\w+$", value)[0] if isinstance(value, str) else ""
    is_there = Path(name).suffix != "" and not Path(name).exists() and (folder / name).is_file()
    return f"{folder}/{value}" if is_there else value


def _several(prompts: str | Sequence[object]) -> list[object]:
    """A list of prompts, also of a single one."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Mapping)):
        return [prompts]
    return list(prompts)


def _check_room(prompts: Sequence[Sequence[int]], max_new_tokens: int, context: int | None) -> None:
    for number, ids in enumerate(prompts):
        if context is not None and len(ids) + max_new_tokens > context:
            raise ValueError(
                f"prompts[{number}]: its {len(ids)} tokens and max_new_tokens={max_new_tokens} exceed the model's "
                f"context of {context} tokens. Lower max_new_tokens (--max-new-tokens), or shorten the prompt"
            )


def _until(stops: Sequence[str], tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> tuple[list[int], str, bool]:
    """Cut a response before the first of some texts: the tokens up to the one that completes it, the text before it."""
    text = decode(tokenizer, tokens, skip_special_tokens=True)
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    if not places:
        return tokens, text, False
    count = next(
        count
        for count in range(1, len(tokens) + 1)
        if any(stop in decode(tokenizer, tokens[:count], skip_special_tokens=True) for stop in stops)
    )
    return tokens[:count], text[: min(places)], True


def _messages(prompt: Any, number: int) -> list[Message]:
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}]
    fits = isinstance(prompt, Sequence) and all(
        isinstance(one, Mapping) and all(isinstance(one.get(key), str) for key in ("role", "content")) for one in prompt
    )
    if not fits or not prompt:
        raise ValueError(f"prompts[{number}]: {prompt!r:.80} is no prompt; give a text, or a list of {{role, content}}")
    return list(prompt)
