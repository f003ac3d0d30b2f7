"""Out of memory in a step: micro-batches are split, gradients stay the same, and it is said once."""

import logging
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tests.training.batches import ROWS, gradients, make_batch, make_critic, make_engine, make_policy
from tests.training.test_control_network import SPECS, make, random_samples
from tests.training.test_control_network import gradients as control_gradients
from tether.batch import TrainBatch
from tether.models.control.mlp_policy import make_policy as make_control_policy
from tether.models.control.spec import PolicySpec
from tether.training.control.learner import ControlLearner, ControlLoss, ControlPlan
from tether.training.engines.optimizer import OptimizerOptions
from tether.training.out_of_memory import is_out_of_memory
from tether.training.text.forward import PolicyModel
from tether.training.text.losses import PolicyLoss
from tether.training.text.micro_batches import MicroBatching, RowSize

KEY = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
SAID = f"To make this permanent: {KEY}=2"


def on_the_device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def on_the_cpu() -> None:
    torch.empty(2**60)  # a real refusal of the CPU's allocator


def in_numpy() -> None:
    raise MemoryError("Unable to allocate 8.00 EiB")


class Fits:
    """Passes on up to `rows` rows; more are out of memory: in the forward pass, or when gradients come back."""

    def __init__(self, fail, rows: int, *, backward: bool) -> None:
        self._fail, self._rows, self._backward = fail, rows, backward

    def __call__(self, rows: int, value: Tensor) -> Tensor:
        if rows > self._rows and self._backward and value.requires_grad:
            value = value.clone()
            value.register_hook(lambda gradient: self._fail())
        elif rows > self._rows:
            self._fail()
        return value


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    return make_batch(make_policy(), make_critic())


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("fail", [on_the_device, on_the_cpu, in_numpy])
@pytest.mark.parametrize("master", [None, torch.bfloat16], ids=["float64", "masters"])
def test_gradients_of_text_are_the_same(fail, backward: bool, master, batch: TrainBatch, caplog) -> None:
    dtype = torch.float64 if master is None else torch.float32
    found = {}
    for rows in (ROWS, 2):
        engine = make_engine(make_policy(dtype=dtype), MicroBatching(max_rows=ROWS, key=KEY), compute_dtype=master)
        model, fits = PolicyModel(engine.model), Fits(fail, rows, backward=backward)

        def forward(micro: TrainBatch, model=model, fits=fits):
            outputs = model(micro)
            outputs.log_probs = fits(len(micro), outputs.log_probs)
            return outputs

        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                engine.accumulate_gradients(batch, forward, PolicyLoss())
        found[rows] = [parameter.grad.clone() for parameter in engine.trained]
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if master is None else {"rtol": 2e-2, "atol": 2e-3}
    for whole, split in zip(found[ROWS], found[2], strict=True):
        torch.testing.assert_close(split, whole, **tolerance)
    assert [record.getMessage().endswith(SAID) for record in caplog.records] == [True]


def test_outputs_without_gradients_are_split(batch: TrainBatch, caplog) -> None:
    engine, fits = make_engine(make_policy()), Fits(on_the_cpu, 4, backward=False)
    model = PolicyModel(engine.model)

    def forward(micro: TrainBatch):
        fits(len(micro), micro.response_mask)
        return model(micro)

    tokens = MicroBatching(max_tokens=1000, key="actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu")
    split = engine.infer(batch, forward, tokens).log_probs
    torch.testing.assert_close(split, engine.infer(batch, model).log_probs, rtol=1e-10, atol=1e-10)
    assert "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=" in caplog.text


def test_one_row_that_does_not_fit_is_one_clear_error(batch: TrainBatch) -> None:
    engine = make_engine(make_policy())

    def forward(micro: TrainBatch):
        on_the_cpu()

    with pytest.raises(
        ValueError, match=r"a single row \(.*can't allocate memory.*\)\. Lower data\.max_response_length"
    ):
        engine.accumulate_gradients(batch, forward, PolicyLoss())


def test_other_errors_pass_and_nothing_is_split(batch: TrainBatch) -> None:
    engine, calls = make_engine(make_policy()), []

    def forward(micro: TrainBatch):
        calls.append(len(micro))
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        engine.accumulate_gradients(batch, forward, PolicyLoss())
    assert calls == [ROWS]
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_a_step_that_summed_on_after_a_failure_would_show(batch: TrainBatch) -> None:
    """The negative control: gradients of the failed attempt left in the sum."""
    engine = make_engine(make_policy())
    forward, loss = PolicyModel(engine.model), PolicyLoss()
    engine.accumulate_gradients(batch, forward, loss)
    right = gradients(engine.model)
    engine.optimizer.zero_grad = lambda set_to_none=False: None
    engine.accumulate_gradients(batch, forward, loss)
    assert any(not torch.allclose(right[name], wrong) for name, wrong in gradients(engine.model).items())


def test_limits_are_halved_until_each_row_is_alone() -> None:
    rows = [RowSize(i, 2, length) for i, length in enumerate((8, 4, 4, 2, 1))]
    for limits in (MicroBatching(max_rows=64), MicroBatching(max_tokens=500), MicroBatching(max_rows=5, packed=False)):
        sizes = []
        while limits is not None:
            groups = limits.split(rows)
            sizes.append(max(map(len, groups)))
            assert sorted(row for group in groups for row in group) == list(range(5))
            limits = limits.halved(rows)
        assert sizes[0] == 5
        assert sizes[-1] == 1
        assert sizes == sorted(sizes, reverse=True)


LOSSES = ["vanilla", "clip_cov"]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("loss_name", LOSSES)
def test_gradients_of_control_are_the_same(name: str, loss_name: str, caplog, monkeypatch) -> None:
    """clip_cov draws tokens: an attempt that is repeated has to draw the same ones."""
    policy = make(name)
    loss = ControlLoss(loss_name, options={}, selection={"clip_cov_lb": 0.0} if loss_name == "clip_cov" else {})
    samples = random_samples(policy)
    whole = control_gradients(policy, samples, loss)
    fits = Fits(on_the_cpu, 4 if policy.state_width else 3, backward=True)  # 4: one sequence
    kept = type(policy)._kept

    def fail_on_many(self, obs, memory):
        outputs, values = kept(self, obs, memory)
        return fits(len(obs) * (memory.kept.shape[1] if memory is not None else 1), outputs), values

    monkeypatch.setattr(type(policy), "_kept", fail_on_many)
    split = control_gradients(policy, samples, loss)
    for name_, gradient in whole.items():
        torch.testing.assert_close(split[name_], gradient, rtol=1e-10, atol=1e-10)
    (said,) = {record.getMessage() for record in caplog.records}
    assert said.endswith(f"{KEY}={policy.micro_batch}")


def test_a_small_policy_that_does_not_fit_is_one_clear_error(monkeypatch) -> None:
    policy = make_control_policy(PolicySpec(5, (3,), 1, hidden_dim=6, num_layers=1, activation="tanh"), seed=0)
    learner = ControlLearner(policy, ControlLoss(), ControlPlan(8, 1), OptimizerOptions(lr=1e-2), 1e-2)
    monkeypatch.setattr(type(policy), "run", lambda self, *arguments: on_the_cpu())
    with pytest.raises(ValueError, match=r"out of memory .*Lower actor_rollout_ref\.actor\.ppo_mini_batch_size"):
        learner.gradients(random_samples(make("lstm")).decisions(), torch.Generator())


LIMITED = """
import resource, sys, torch
from tests.training.batches import make_batch, make_critic, make_engine, make_policy
from tether.training.text.forward import PolicyModel
from tether.training.text.losses import PolicyLoss
from tether.training.text.micro_batches import MicroBatching

torch.set_num_threads(1)
batch = make_batch(make_policy(), make_critic())
batch = batch[torch.arange(len(batch)).repeat(int(sys.argv[1]))]
engine = make_engine(make_policy(), MicroBatching(max_rows=len(batch), key="KEY"))
engine.accumulate_gradients(batch[:9], PolicyModel(engine.model, packed=False), PolicyLoss())
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20,) * 2)
engine.accumulate_gradients(batch, PolicyModel(engine.model, packed=False), PolicyLoss())
"""


def test_a_process_of_limited_memory_goes_on() -> None:
    """Nothing is faked here: the kernel refuses the memory of all rows at once, and gives that of some."""
    done = subprocess.run([sys.executable, "-c", LIMITED, "4000"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "did not fit into memory" in done.stderr
