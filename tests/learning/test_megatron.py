"""A policy in parts learns a small task through the whole trainer, as a whole one does."""

from pathlib import Path

import pytest

from benchmarks.algorithms.cases import GRPO, LEARNED, SHARED
from benchmarks.algorithms.tasks import EOS, PAD, SPELL, TOKENS, overrides, write_inputs
from tests.installed import needs_megatron
from tests.runs.forked_group import ForkedGroup
from tests.runs.tiny_run import train
from tests.tiny import tiny_model
from tether.distributed import groups
from tether.metrics.loggers.headline import validation_means
from tether.metrics.loggers.jsonl import read_metrics

STEPS, SAME_STEPS = 60, 3  # 40 are enough on some processors and not on others, which round otherwise
SIZES = "actor_rollout_ref.actor.megatron"
PARTS = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.strategy=megatron")
LAYOUTS = {"qwen2": f"{SIZES}.tensor_model_parallel_size=2", "qwen2_moe": f"{SIZES}.expert_model_parallel_size=2"}


@pytest.mark.slow
@needs_megatron
@pytest.mark.parametrize("family", LAYOUTS)
def test_it_learns(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks; the first steps are those of one process."""
    monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    runs = {}
    for name, steps, parts in (("one", SAME_STEPS, ()), ("two", STEPS, (*PARTS, LAYOUTS[family]))):
        folder = tmp_path / name
        write_inputs(SPELL, 1, folder)
        ends = {"pad_token_id": TOKENS.index(PAD), "eos_token_id": TOKENS.index(EOS), "bos_token_id": None}
        even = len(TOKENS) + len(TOKENS) % 2  # two ranks share the vocabulary
        tiny_model(family, vocab_size=even, initializer_range=0.1, **ends).save_pretrained(folder / "model")
        constant = "actor_rollout_ref.actor.optim.lr_scheduler_type=constant"
        runs[name] = read_metrics(train([*overrides(SPELL, steps, 1, folder), *SHARED, GRPO, constant, *parts]))
    one, two = runs["one"], runs["two"]
    start, end = (next(iter(validation_means(two[step]).values())) for step in (0, STEPS))
    assert start < LEARNED / 2
    assert end >= LEARNED
    for step in range(1, SAME_STEPS + 1):
        assert two[step]["critic/score/mean"] == one[step]["critic/score/mean"]
        for key in ("actor/grad_norm", "actor/entropy", "actor/pg_loss"):
            assert two[step][key] == pytest.approx(one[step][key], rel=1e-3, abs=1e-5)
