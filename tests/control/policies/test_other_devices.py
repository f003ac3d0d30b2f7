"""A rollout's pass with fake CUDA tensors: an operation that meets a tensor on another device fails.

Nothing is computed; see `tests.text.models.test_other_devices`, also for why gradients are not tested so.
"""

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.control.policies.test_network import SPECS, draw
from tests.text.models.test_other_devices import CUDA, fake_cuda  # noqa: F401  (a fixture)
from tether.batch import EnvBatch
from tether.control.learning.losses import RolloutForward
from tether.control.policies.mlp_policy import Policy, make_policy
from tether.control.policies.networks import device_of
from tether.control.policies.spec import PolicySpec

COLUMNS, DECISIONS = 3, 4


class AlsoWithoutCuda(TorchFunctionMode):
    """Two more operations that a PyTorch without CUDA refuses, by others that come to the same."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.contiguous:
            return args[0].clone(memory_format=torch.contiguous_format)
        if func is Tensor.log_softmax:
            return args[0] - args[0].logsumexp(kwargs["dim"], keepdim=True)
        return func(*args, **(kwargs or {}))


def on_cuda(policy: Policy) -> Policy:
    """Fake tensors cannot be moved in place, as ``to`` does it."""
    for module in policy.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(torch.empty(parameter.shape, device=CUDA)))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=CUDA))
    return policy


def batch_for(spec: PolicySpec) -> EnvBatch:
    """On the CPU, as environments give it: one episode is cut after the second decision of the first column."""
    chunk = spec.num_action_chunks
    obs = {name: torch.from_numpy(part) for name, part in draw(spec, COLUMNS, DECISIONS + 1).items()}
    final = {name: torch.from_numpy(part) for name, part in draw(spec, 1).items()}
    flags = torch.zeros(COLUMNS, DECISIONS * chunk, dtype=torch.bool)
    width = spec.action_width * chunk
    actions = torch.zeros(COLUMNS, DECISIONS, width, dtype=torch.float32 if spec.choices is None else torch.int64)
    states = 2 * (spec.lstm_dim or 0) * (1 if spec.share_critic or not spec.value_width else 2)
    return EnvBatch(
        TensorDict(obs, batch_size=[COLUMNS, DECISIONS + 1]), actions, torch.zeros(flags.shape), flags, flags, ~flags,
        torch.zeros(COLUMNS, DECISIONS + 1, dtype=torch.bool), torch.zeros(COLUMNS, states),
        TensorDict(final, batch_size=[1]), (torch.tensor([0]), torch.tensor([2 * chunk - 1])), (),
    )  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_a_rollout_is_looked_at_on_another_device_and_comes_back(name: str, fake_cuda: None) -> None:  # noqa: F811
    policy = on_cuda(make_policy(SPECS[name], seed=0))
    assert device_of(policy) == CUDA
    with AlsoWithoutCuda():
        outputs = RolloutForward()(policy, batch_for(SPECS[name]))
    found = [outputs.log_probs, outputs.seen, outputs.values, outputs.bootstrap_values]
    assert {part.device.type for part in found if part is not None} == {"cpu"}
    assert outputs.log_probs.shape[:2] == (COLUMNS, DECISIONS)
