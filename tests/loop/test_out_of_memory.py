"""Out of memory in a step: micro-batches are split, gradients stay the same, and it is said once."""

import logging
import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.control.learning.flat_learner import flat_learner
from tests.control.learning.test_control_network import SPECS, make, random_samples
from tests.control.learning.test_control_network import gradients as control_gradients
from tests.pairwise import pairwise_parameters
from tests.text.learning.batches import ROWS, gradients, make_batch, make_critic, make_engine, make_policy
from tether.batch import TrainBatch
from tether.control.learning.flat import retry_with_smaller_micro_batches
from tether.control.learning.losses import ControlLoss, Samples
from tether.control.policies.mlp_policy import ControlPolicy
from tether.control.policies.network_policy import Torso
from tether.control.policies.networks import Mlp
from tether.control.policies.spec import PolicySpec, RolloutEvaluation
from tether.loop.engine import LossSpec, UpdatePlan, is_out_of_memory
from tether.text.learning.losses import PolicyForward, PolicyLoss
from tether.text.learning.packing import MicroBatching, RowSize

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


@pytest.mark.parametrize(
    ("fail", "backward", "master"),
    pairwise_parameters([on_the_device, on_the_cpu, in_numpy], [False, True], [None, torch.bfloat16]),
)
def test_gradients_of_text_are_the_same(fail, backward: bool, master, batch: TrainBatch, caplog) -> None:
    dtype = torch.float64 if master is None else torch.float32
    found = {}
    for rows in (ROWS, 2):
        engine = make_engine(make_policy(dtype=dtype), MicroBatching(max_rows=ROWS, key=KEY), compute_dtype=master)
        model, fits = PolicyForward(), Fits(fail, rows, backward=backward)

        def forward(policy, micro: TrainBatch, reference, model=model, fits=fits):
            outputs = model(policy, micro)
            outputs.log_probs = fits(len(micro), outputs.log_probs)
            return outputs

        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                engine.accumulate_gradients(batch, LossSpec(forward, PolicyLoss()))
        found[rows] = [parameter.grad.clone() for parameter in engine.trained]
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if master is None else {"rtol": 2e-2, "atol": 2e-3}
    for whole, split in zip(found[ROWS], found[2], strict=True):
        torch.testing.assert_close(split, whole, **tolerance)
    assert [record.getMessage().endswith(SAID) for record in caplog.records] == [True]


def test_outputs_without_gradients_are_split(batch: TrainBatch, caplog) -> None:
    tokens = MicroBatching(max_tokens=1000, key="actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu")
    engine, fits = make_engine(make_policy(), infer_micro=tokens), Fits(on_the_cpu, 4, backward=False)
    model = PolicyForward()

    def forward(policy, micro: TrainBatch, reference):
        fits(len(micro), micro.response_mask)
        return model(policy, micro)

    split = engine.infer(batch, forward).log_probs
    torch.testing.assert_close(split, engine.infer(batch, model).log_probs, rtol=1e-10, atol=1e-10)
    assert "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=" in caplog.text


def test_one_row_that_does_not_fit_is_one_clear_error(batch: TrainBatch) -> None:
    engine = make_engine(make_policy())

    def forward(policy, micro: TrainBatch, reference):
        on_the_cpu()

    with pytest.raises(
        ValueError, match=r"a single row \(.*can't allocate memory.*\)\. Lower data\.max_response_length"
    ):
        engine.accumulate_gradients(batch, LossSpec(forward, PolicyLoss()))


def test_other_errors_pass_and_nothing_is_split(batch: TrainBatch) -> None:
    engine, calls = make_engine(make_policy()), []

    def forward(policy, micro: TrainBatch, reference):
        calls.append(len(micro))
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        engine.accumulate_gradients(batch, LossSpec(forward, PolicyLoss()))
    assert calls == [ROWS]
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_a_step_that_summed_on_after_a_failure_would_show(batch: TrainBatch) -> None:
    """The negative control: gradients of the failed attempt left in the sum."""
    engine = make_engine(make_policy())
    forward, loss = PolicyForward(), PolicyLoss()
    engine.accumulate_gradients(batch, LossSpec(forward, loss))
    right = gradients(engine.model)
    engine.optimizer.zero_grad = lambda set_to_none=False: None
    engine.accumulate_gradients(batch, LossSpec(forward, loss))
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
    decide = type(policy).decide

    def fail_on_many(self, obs, memory, actions=None):
        outputs, values = decide(self, obs, memory, actions)
        return fits(len(obs) * (memory.selected.shape[1] if memory is not None else 1), outputs), values

    monkeypatch.setattr(type(policy), "decide", fail_on_many)
    split = control_gradients(policy, samples, loss)
    for name_, gradient in whole.items():
        torch.testing.assert_close(split[name_], gradient, rtol=1e-10, atol=1e-10)
    (said,) = {record.getMessage() for record in caplog.records}
    assert said.endswith(f"{KEY}={policy.micro_batch}")


PERCEPTRONS = {
    "two networks": {"choices": (3,), "hidden_dim": 6},
    "shared": {"choices": None, "hidden_dim": 6, "share_critic": True},
    "no critic": {"choices": (3,), "hidden_dim": 6, "value_width": 0},
}


def perceptrons(shape: str) -> ControlPolicy:
    """In float64, and away from its first weights."""
    policy = ControlPolicy(PolicySpec(5, action_width=1, num_layers=2, **PERCEPTRONS[shape]), seed=0).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return policy


def decisions_of(policy: ControlPolicy, count: int = 24) -> Samples:
    generator = torch.Generator().manual_seed(1)
    obs = torch.randn(count, 5, dtype=torch.float64, generator=generator)
    columns = torch.randn(5, count, 1, dtype=torch.float64, generator=generator)
    actions = torch.randint(0, 3, (count, 1), generator=generator) if policy.spec.choices else columns[0]
    values = (columns[3], columns[4]) if policy.critic is not None else (None, None)
    return Samples(obs, actions, columns[1] - 1, columns[2], *values)


@pytest.mark.parametrize(
    ("shape", "loss_name", "size", "train_policy"),
    pairwise_parameters(list(PERCEPTRONS), LOSSES, [1, 5, 8, 23], [True, False]),
)
def test_micro_batches_of_perceptrons_change_no_gradient(
    shape: str, loss_name: str, size: int, train_policy: bool
) -> None:
    policy = perceptrons(shape)
    loss = ControlLoss(loss_name, entropy_coeff=0.05, selection={"clip_cov_lb": 0.0} if loss_name == "clip_cov" else {})
    samples = decisions_of(policy)
    whole = control_gradients(policy, samples, loss, None, train_policy=train_policy)
    assert any(gradient.any() for gradient in whole.values()) or not (train_policy or policy.critic)
    split = control_gradients(policy, samples, loss, size, train_policy=train_policy)
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


def test_a_sum_over_micro_batches_that_lost_one_would_show(monkeypatch) -> None:
    """The negative control: each micro-batch writes over the gradient of the one before."""
    policy = perceptrons("two networks")
    samples = decisions_of(policy)
    whole = control_gradients(policy, samples, ControlLoss())
    backward = Mlp.backward
    monkeypatch.setattr(Mlp, "backward", lambda self, *arguments, add=False: backward(self, *arguments))
    wrong = control_gradients(policy, samples, ControlLoss(), 8)
    assert any(not torch.allclose(wrong[name], gradient) for name, gradient in whole.items())


def test_perceptrons_that_do_not_fit_are_split(caplog, monkeypatch) -> None:
    """In the update, and where a whole rollout is valued; both say which setting makes it permanent."""
    policy = perceptrons("two networks")
    samples = decisions_of(policy)
    whole = control_gradients(policy, samples, ControlLoss())
    rollout = torch.randn(6, 4, 5, dtype=torch.float64)
    final_at = (torch.tensor([0, 2]), torch.tensor([1, 1]))
    nothing = torch.zeros(0)

    def review() -> RolloutEvaluation:
        return policy.review(rollout, nothing, nothing, rollout[1, :2], final_at)

    expected = review()
    activations, fits = Mlp.activations, Fits(on_the_cpu, 5, backward=False)
    monkeypatch.setattr(Mlp, "activations", lambda self, x: activations(self, fits(len(x), x)))
    split = control_gradients(policy, samples, ControlLoss())
    assert policy.micro_batch == 3  # 24, 12, 6, 3
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-10, atol=1e-12)
    policy.micro_batch = None
    found = retry_with_smaller_micro_batches(policy, review, 18)
    assert policy.micro_batch == 4  # 18, 9, 4
    for part in ("outputs", "values", "final_values"):
        torch.testing.assert_close(getattr(found, part), getattr(expected, part), rtol=1e-10, atol=1e-12)
    assert [record.getMessage().split("permanent: ")[1] for record in caplog.records] == [f"{KEY}=3", f"{KEY}=4"]


@pytest.mark.parametrize("name", ["cnn", "two cnns"])
def test_a_long_rollout_with_pictures_is_split_below_a_column(name: str, monkeypatch) -> None:
    """Of 7 decisions, when only 5 fit; the last observations of episodes likewise."""
    policy = make(name)
    rows = random_samples(policy).obs
    rollout, final = rows[:14].reshape(2, 7), rows[14:]
    at = (torch.zeros(10, dtype=torch.long), torch.zeros(10, dtype=torch.long))

    def review() -> RolloutEvaluation:
        return policy.review(rollout, torch.zeros(2, 7), torch.zeros(2, 0), final, at)

    expected = review()
    look, fits = Torso._before_lstm, Fits(on_the_cpu, 5, backward=False)

    def fail_on_many(self, obs):
        return fits(obs.batch_size.numel(), look(self, obs))

    monkeypatch.setattr(Torso, "_before_lstm", fail_on_many)
    found = retry_with_smaller_micro_batches(policy, review, 12)
    for part in ("outputs", "values", "final_values"):
        torch.testing.assert_close(getattr(found, part), getattr(expected, part), rtol=1e-10, atol=1e-12)


def test_a_small_policy_that_does_not_fit_is_one_clear_error(monkeypatch) -> None:
    policy = perceptrons("two networks")
    learner = flat_learner(policy)
    monkeypatch.setattr(Mlp, "activations", lambda self, x: on_the_cpu())
    with pytest.raises(ValueError, match=r"out of memory .*Lower actor_rollout_ref\.actor\.ppo_mini_batch_size"):
        learner.engine.gradients(decisions_of(policy), ControlLoss())


@pytest.mark.parametrize("fail", [on_the_device, on_the_cpu, in_numpy])
def test_out_of_memory_in_the_optimizers_step_is_one_clear_error(fail, batch: TrainBatch, monkeypatch) -> None:
    """Its moments are allocated there, and a step that is half done cannot be repeated."""
    engine = make_engine(make_policy())
    monkeypatch.setattr(engine.optimizer, "step", fail)
    with pytest.raises(
        ValueError, match=r"^out of memory in the optimizer's step \(.*\)\. .*actor_rollout_ref\.model\.lora_rank"
    ):
        engine.update(batch, LossSpec(PolicyForward(), PolicyLoss()), UpdatePlan(ROWS), step=0)


@pytest.mark.slow
def test_a_process_of_limited_memory_goes_on(caplog) -> None:
    """Nothing is faked here: the kernel refuses the memory of all rows at once, and gives that of some."""
    learner = flat_learner(ControlPolicy(PolicySpec(5, (3,), 1, num_layers=2, hidden_dim=128), seed=0))
    rows = 100_000  # 51 MB an activation
    columns = torch.randn(4, rows, 1)
    samples = Samples(torch.randn(rows, 5), torch.randint(0, 3, (rows, 1)), *columns)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 75 * 2**20, limits[1]))
    try:
        learner.engine.gradients(samples, ControlLoss())
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert "did not fit into memory" in caplog.text
