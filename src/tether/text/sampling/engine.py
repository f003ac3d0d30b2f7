"""The `native` engine: in-process generation with any causal language model of transformers.

Common families use tether's forward pass (`tether.text.sampling.decoder`), all others that of transformers; attention
and its cache are always tether's (`tether.text.sampling.kv_cache`). LoRA adapters are merged into a copy of their
layers. Up to `max_num_seqs` responses are decoded at the same time. A finished response frees its slot at once: the
last row moves there, and a waiting prompt gets the free slot, so that the active rows are always the first ones and no
time is spent on finished ones::

    waiting rows --prefill--> slots [ row 4 | row 1 | row 7 |  free ] --decode--> finished rows
                                 ^ n responses of a prompt share one prefill

A row that waits for a responder releases its slot. Its keys and values stay cached, up to a total number of tokens;
rows that do not fit are prefilled again with their full context.

The samples of a row depend on its prompt, the weights and the `NoiseKey`, not on the other rows, up to float rounding
of the model's forward, which may differ with the number of rows in a matrix product.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.batch import RolloutBatch, TokenIds, WeightUpdate, as_token_ids
from tether.kernels import AttentionLayout
from tether.text.models.layers import context_length, use_tether_attention
from tether.text.sampling.decoder import Decoder, ReplayedDecoder, decoder_for
from tether.text.sampling.expert_recorder import ExpertRecorder
from tether.text.sampling.generation import Forward, Generation, max_row_length
from tether.text.sampling.kv_cache import PrefixCache
from tether.text.sampling.protocol import (
    FinishedResponse,
    NoiseKey,
    Responder,
    RolloutProgress,
    SamplingParams,
    check_prompts,
)

_log = logging.getLogger(__name__)


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that end a response according to the model's generation config; empty if it names none."""
    config = model.generation_config
    ids = None if config is None else config.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or [])


class NativeEngine:
    """Generates with the trainer's own model.

    In the model's own dtype the engine shares the weights, except for packed copies that make products faster and are
    refreshed automatically (`tether.text.sampling.decoder`). With another `dtype` the engine has a private copy of the
    parameters in that dtype, refreshed by `load_weights`, so that no product has to cast its operands.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: frozenset[int],
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_kept_tokens: int = 65536,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Prepare the model for generation.

        Args:
            model: the model, whose forward requires ``attention_layout=`` from now on
                (`tether.text.models.layers`).
            eos_token_ids: tokens that end a response.
            max_num_seqs: maximum number of responses decoded at a time, and slots of the KV cache.
            max_num_batched_tokens: maximum number of prompt tokens in one prefill; a single longer prompt still runs.
            max_kept_tokens: maximum number of tokens whose cache is kept for rows that wait for a responder, and in
                `caching_prefixes`; other rows are prefilled again.
            dtype: dtype of generation; None: that of the model.
        """
        use_tether_attention(model)
        self._trained = model if dtype in (None, model.dtype) else _copy_as(model, dtype)
        """The model into which weights are loaded; possibly with adapters."""
        self._has_adapters = hasattr(model, "peft_config")
        self._model = _lora().merged_copy(self._trained) if self._has_adapters else self._trained
        """The model that is sampled from, with adapters merged."""
        self._forward: Forward | None = None  # built when it is first used
        self.eos_token_ids = eos_token_ids
        self._version = 0
        self._call: Generation | None = None  # in progress
        self._next_weights: WeightUpdate | None = None  # loaded before its next step
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_kept_tokens = max_kept_tokens
        self._prefixes: PrefixCache | None = None

    @property
    def context(self) -> int | None:
        return context_length(self._model.config)

    def load_weights(self, weights: WeightUpdate) -> None:
        if self._call is None:
            self._load(weights)
        else:
            self._next_weights = weights

    def _load(self, weights: WeightUpdate) -> None:
        weights.copy_to(self._trained)
        self._version = weights.version
        if self._prefixes is not None:
            self._prefixes.clear()

    @contextmanager
    def caching_prefixes(self) -> Iterator[PrefixCache]:
        """Within this context, keep the caches of finished rows for prompts of later calls that continue them."""
        self._prefixes = PrefixCache(self._max_kept_tokens)
        try:
            yield self._prefixes
        finally:
            self._prefixes = None

    def generate(
        self,
        prompts: Sequence[Sequence[int] | TokenIds],
        sampling: SamplingParams,
        key: NoiseKey,
        on_finished: Callable[[FinishedResponse], None] | None = None,
        on_progress: Callable[[RolloutProgress], None] | None = None,
        responder: Responder | None = None,
    ) -> RolloutBatch:
        """Generate as `RolloutEngine.generate` describes; the batch is as wide as its longest response.

        Raises:
            ValueError: no prompts, an empty prompt, or one too long for `max_length` or the model's context; or experts
                are to be recorded for a model without experts.
            RuntimeError: the model's logits for a sample are NaN or infinite.
        """
        arrays = [as_token_ids(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]
        check_prompts(arrays, sampling, self.context)
        # no_grad and not inference_mode: a buffer that a forward replaces must stay usable in training.
        with torch.no_grad(), _evaluating(self._model):
            self._prepare_forward()
            recorder = self._recorder(arrays, sampling) if sampling.record_experts else None
            call = self._call = Generation(
                self._model,
                self._forward_of_call(recorder),
                arrays,
                sampling,
                key,
                eos=self.eos_token_ids,
                num_slots=min(self._max_num_seqs, len(prompts) * sampling.n),
                max_prefill_tokens=self._max_num_batched_tokens,
                max_kept_tokens=self._max_kept_tokens,
                on_finished=on_finished,
                responder=responder,
                version=self._version,
                recorder=recorder,
                prefixes=self._prefixes if sampling.n == 1 and recorder is None else None,
            )
            try:
                while call.step():
                    if on_progress is not None:
                        on_progress(call.progress())
                    if self._change_weights():
                        self._prepare_forward()
                        call.renew(self._forward_of_call(recorder), self._version)
            finally:
                self._call = None
                self._change_weights()
        return call.result()

    def _change_weights(self) -> bool:
        """Load weights that arrived during a call, and return whether there were any."""
        weights, self._next_weights = self._next_weights, None
        if weights is not None:
            self._load(weights)
        return weights is not None

    def _recorder(self, prompts: Sequence[TokenIds], sampling: SamplingParams) -> ExpertRecorder:
        return ExpertRecorder(self._model, len(prompts) * sampling.n, max_row_length(prompts, sampling))

    def _forward_of_call(self, recorder: ExpertRecorder | None = None) -> Forward:
        """Return the forward pass with the model's current weights."""
        assert self._forward is not None
        if recorder is not None:
            return partial(self._by_transformers, recorder=recorder)
        return ReplayedDecoder(self._forward) if isinstance(self._forward, Decoder) else self._forward

    def _prepare_forward(self) -> None:
        """Build the forward pass, or refresh it with the model's current weights."""
        if self._has_adapters:
            _lora().merge_adapters(self._trained, self._model)
        if self._forward is None:
            self._forward = decoder_for(self._model) or self._by_transformers
            if not isinstance(self._forward, Decoder):
                name = type(self._model).__name__
                _log.warning("%s is sampled from with transformers' own forward pass, which is slower", name)
        if isinstance(self._forward, Decoder):
            self._forward.refresh()

    def _by_transformers(
        self,
        ids: Tensor,
        positions: Tensor,
        layout: AttentionLayout,
        keep: Tensor | None,
        recorder: ExpertRecorder | None = None,
    ) -> Tensor:
        options: dict[str, object] = {}
        if recorder is not None:
            options["expert_choice"] = recorder.begin()
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            attention_layout=layout,
            logits_to_keep=0 if keep is None else keep,
            **options,
        )
        logits: Tensor = output.logits.flatten(0, 1)
        return logits


def _lora() -> ModuleType:
    """Import `tether.text.models.lora` on first use, because peft is an extra."""
    return importlib.import_module("tether.text.models.lora")


def _copy_as(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a copy with parameters in `dtype`; tied parameters stay tied, and buffers (RoPE frequencies) keep their
    dtype."""
    parameters = {id(p): nn.Parameter(p.detach().to(dtype), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, parameters)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set every submodule to eval mode and restore the modes on exit."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
