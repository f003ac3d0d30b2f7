"""A CNN that computes in bfloat16 (`policy.dtype`), with float32 weights in the optimizer, learns as in float32."""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from tests.control.learning.flat_learner import flat_learner
from tether.control.learning.losses import Samples
from tether.control.policies.mlp_policy import load_policy, make_policy
from tether.control.policies.network_policy import Cnn
from tether.control.policies.spec import NUMBERS, PICTURE, PolicySpec
from tether.observations import ObsPart

LAYOUT = (ObsPart("image", "image", (7, 7, 3), "uint8"), ObsPart("hand", "vector", (2,)))
SPEC = PolicySpec(2, (3,), 1, hidden_dim=16, num_layers=1, layout=LAYOUT, pictures=("image",))


def prepared(dtype, **changes):
    policy = make_policy(replace(SPEC, dtype=dtype, **changes), seed=0)
    return policy, flat_learner(policy)


def samples(policy, rows=24):
    generator = torch.Generator().manual_seed(1)
    picture = torch.randint(0, 256, (rows, 3, 7, 7), dtype=torch.uint8, generator=generator)
    obs = TensorDict({NUMBERS: torch.randn(rows, 2, generator=generator), PICTURE: picture}, batch_size=rows)
    actions = torch.randint(0, 3, (rows, 1), generator=generator)
    normal = torch.randn(3, rows, 1, generator=generator)
    return Samples(obs, actions, policy.log_probs(obs, actions).detach(), normal[0], normal[1], normal[2])


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
def test_only_the_cnns_are_narrow_and_scores_and_gradients_are_near_those_of_float32(activation):
    found = {}
    for name, dtype, micro_batch in (("exact", "float32", None), ("whole", "bfloat16", None), ("parts", "bfloat16", 5)):
        policy, learner = prepared(dtype, activation=activation)
        in_cnns = {p for module in policy.modules() if isinstance(module, Cnn) for p in module.parameters()}
        assert len(in_cnns) == 8
        assert {p.dtype for p in in_cnns} == {getattr(torch, dtype)}
        assert {p.dtype for p in policy.parameters() if p not in in_cnns} == {torch.float32}
        policy.micro_batch = micro_batch
        mini = samples(policy)
        outputs, _ = policy.act(mini.obs, torch.zeros(24, 0))
        assert outputs.dtype == torch.float32
        learner.engine.gradients(mini, learner.loss.function)
        found[name] = outputs, learner.engine._flat.grads.clone()
    (outputs, grads), others = found.pop("exact"), found.values()
    for narrow_outputs, narrow_grads in others:
        assert not torch.equal(narrow_outputs, outputs)
        torch.testing.assert_close(narrow_outputs, outputs, rtol=0.05, atol=1e-3)
        assert narrow_grads.dtype == torch.float32
        assert torch.cosine_similarity(narrow_grads, grads, dim=0) > 0.99


def test_files_have_the_float32_weights_and_a_loaded_policy_computes_in_float32(tmp_path):
    policy, learner = prepared("bfloat16")
    for step in range(3):
        learner.update(samples(policy), step)
    learner.engine.save(tmp_path / "policy")
    masters = learner.engine._flat.values
    assert not torch.equal(masters, masters.bfloat16().float())
    loaded = load_policy(tmp_path / "policy")
    saved = torch.cat([value.reshape(-1) for group in loaded.parameter_groups() for value in group])
    assert torch.equal(saved, masters)
