"""Models on devices of their own: the bits of one process, whichever model is where."""

from pathlib import Path

import pytest

from tests.runs.test_devices import KEY, overrides
from tests.runs.tiny_run import measured, same, train, weights, write_inputs

ADDED = ("global_seqlen/", "transfer/", "training/")
APART = [f"{KEY}=3", "cluster.component_placement={actor: 0, critic: 1, inference: 1, rollout: 2}"]
SAMPLES = ["actor_rollout_ref.rollout.nnodes=1"]
AHEAD = "trainer.async_mode=one_step_off"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("both", "on_devices", "runs"),
    [([], APART, (2, 3)), ([AHEAD], SAMPLES, (3,)), (["actor_rollout_ref.model.lora_rank=2"], SAMPLES, (3,))],
    ids=["apart", "ahead", "adapters"],
)
def test_models_that_are_apart_train_as_one_process(
    both: list[str], on_devices: list[str], runs: tuple[int, ...], inputs: Path, tmp_path: Path
) -> None:
    one = train([*overrides(inputs, tmp_path / "one", 1, 3), *both])
    for steps in runs:  # the second from a checkpoint
        apart = train([*overrides(inputs, tmp_path / "apart", 1, steps), *both, *on_devices])
    for role in ("actor", "critic"):
        assert same(weights(one / "global_step_3", role), weights(apart / "global_step_3", role))
    expected, found = measured(one), measured(apart)
    for step in (1, 2, 3):
        shown = {key: value for key, value in found[step].items() if not key.startswith(ADDED)}
        assert same({key: expected[step][key] for key in shown}, shown)
