"""Which choices an environment allows: they alone are sampled, tested and learned from."""

import math

import numpy as np
import pytest
import torch
from torch import nn

gymnasium = pytest.importorskip("gymnasium")

from tests.control.envs import toys  # noqa: E402
from tests.runs.test_control import learned, train  # noqa: E402
from tether.control.collecting.agent import EnvAgent  # noqa: E402
from tether.control.envs.make import EnvOptions, ObservationOptions, make_vector_env  # noqa: E402
from tether.control.policies.mlp_policy import make_policy  # noqa: E402
from tether.control.policies.spec import PolicySpec  # noqa: E402
from tether.observations import ObsPart  # noqa: E402

MASKS = ["env.train.action_masks=True", "env.train.max_steps_per_rollout_epoch=12"]


@pytest.fixture(autouse=True)
def _toys():
    toys.register()


CUT = ["env.train.init_params.cut=True"]  # an episode that is cut tells no more of its masks than one that ends


SLOW = [pytest.param(more, marks=pytest.mark.slow) for more in ([], ["policy.share_critic=True"])]


@pytest.mark.parametrize("more", [["policy.lstm_dim=8", *CUT], *SLOW], ids=str)
def test_choices_are_learned_among_those_that_are_allowed(more, tmp_path):
    # What is worth most depends on the mask alone, and any other choice ends the run with an error.
    assert learned(tmp_path, "Allowed", 10, *MASKS, *more) == 4


def test_choices_that_are_not_allowed_are_an_error(tmp_path):
    # The negative control.
    with pytest.raises(AssertionError, match="not allowed"):
        learned(tmp_path, "Allowed", 20, *MASKS, "env.train.action_masks=False")


class Own(nn.Module):
    def __init__(self, obs_dim, outputs, values):
        super().__init__()
        self.actor, self.critic = nn.Linear(obs_dim, outputs), nn.Linear(obs_dim, values)

    def forward(self, obs):
        return self.actor(obs), self.critic(obs)


LAYOUT = (ObsPart("state", "vector", (2,)), ObsPart("action_mask", "mask", (5,), "int8"))


@pytest.mark.parametrize("more", [{}, {"lstm_dim": 4}, {"network": "own"}], ids=str)
def test_probabilities_are_those_among_what_is_allowed(more, tmp_path, monkeypatch):
    if "network" in more:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "own.py").write_text("from tests.runs.test_action_masks import Own")
        more = {"network": "own.py:Own"}
    policy = make_policy(PolicySpec(2, (3, 2), 2, layout=LAYOUT, hidden_dim=4, **more), seed=0)
    mask = torch.tensor([[1, 0, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]], dtype=torch.int8)
    obs = policy.inputs({"state": torch.ones(3, 2), "action_mask": mask})
    state = torch.zeros(3, policy.state_width)
    if "lstm_dim" in more:
        outputs = policy(obs.unsqueeze(1), torch.zeros(3, 1, dtype=torch.bool), state)[0][:, 0]
    else:
        outputs = policy(obs, None, state)[0]
    assert torch.allclose(policy.act(obs, state)[0], outputs)
    done = policy.head.evaluate(outputs, torch.tensor([[2, 1], [2, 1], [2, 1]]))
    free = outputs[1].tolist()  # the observations are the same
    first = 1 / (1 + math.exp(free[0] - free[2]))  # of 0 and 2
    assert done.log_probs[0].tolist() == pytest.approx([math.log(first), 0], abs=1e-6)
    entropy = -first * math.log(first) - (1 - first) * math.log(1 - first)
    assert done.entropy[0].tolist() == pytest.approx([entropy, 0], abs=1e-6)
    of_all = [math.exp(free[2]) / sum(map(math.exp, free[:3])), math.exp(free[4]) / sum(map(math.exp, free[3:]))]
    assert done.log_probs[1].exp().tolist() == pytest.approx(of_all, abs=1e-6)
    assert done.log_probs[2, 0].item() == pytest.approx(-math.log(3), abs=1e-6)  # none is allowed: all are alike
    (done.log_probs[0].sum() + done.entropy[0].sum()).backward()
    last = policy.network.actor if "network" in more else policy.actor
    assert torch.equal(last.bias.grad.bool(), torch.tensor([True, False, True, False, False]))
    assert all(parameter.grad.isfinite().all() for parameter in policy.parameters() if parameter.grad is not None)


def test_a_policy_that_is_asked_where_nothing_is_allowed_says_so():
    space = gymnasium.spaces.Dict(
        action_mask=gymnasium.spaces.MultiBinary(5), state=gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    )
    policy = make_policy(PolicySpec(2, (3, 2), 2, layout=LAYOUT, hidden_dim=4), seed=0)
    agent = EnvAgent(policy, space, gymnasium.spaces.MultiDiscrete([3, 2]), "one")
    mask = np.array([[0, 0, 1, 0, 1], [0, 0, 0, 1, 1]], dtype=np.int8)
    assert agent.predict({"state": np.zeros(2, np.float32), "action_mask": mask[0]}).tolist() == [2, 1]
    with pytest.raises(ValueError, match=r"observation: action_mask allows none .* of a choice in row 1; allow one"):
        agent.predict({"state": np.zeros((2, 2), np.float32), "action_mask": mask})


def test_the_mask_of_now_is_shown_beside_what_was_shown():
    env = make_vector_env(EnvOptions("tether/Allowed-v0", 2, view=ObservationOptions(frame_stack=2, action_masks=True)))
    obs = env.reset(0)
    shapes = {part.name: (part.kind, part.shape) for part in env.layout}
    assert shapes == {"action_mask": ("mask", (7,)), "state": ("vector", (2,))}
    inner = [each.unwrapped for each in env._env._envs]
    for _ in range(6):  # over the end of an episode
        assert obs["action_mask"].tolist() == [np.concatenate(each._allowed).tolist() for each in inner]
        obs = env.step(np.array([[np.flatnonzero(column)[0] for column in each._allowed] for each in inner])).obs
    env.close()


class Rps(gymnasium.Env):
    """Three choices; shows a mask of its own."""

    observation_space = gymnasium.spaces.Dict(
        action_mask=gymnasium.spaces.MultiBinary(2), x=gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    )
    action_space = gymnasium.spaces.Discrete(3)


UNSET = "env.train.action_masks=null"


BAD = [
    ([UNSET], r"action_masks: tether/Allowed-v0 tells which .*\(info\[.action_mask.\]\)\. Set true"),
    (["policy.num_action_chunks=2"], r"num_action_chunks=2: .*Allowed-v0 tells which .* in the next step only"),
    (["env.train.init_params.tells=False"], r"action_masks=true: the info of a reset .* holds no .*, but nothing"),
    (["env.train.init_params.tells=once"], r"action_masks=true: the info of a step .* holds no .*, but nothing"),
    (["env.train.id=Pendulum-v1"], r"action_masks=true: the actions of .*Pendulum.* are numbers"),
    (
        ["env.train.id=CartPole-v1", "env.train.vectorization=vector"],
        r"env\.train\.vectorization: CartPole-v1 cannot do what env\.train asks for",
    ),
    (["env.train.id=tether/Rps-v0", UNSET], r"Rps-v0: .* have 2 entries of action_mask, and .* 3 alternatives"),
]


@pytest.mark.parametrize(
    ("vectorization", "more", "message"),
    [
        *(("sync", *bad) for bad in BAD),
        ("subprocess", *BAD[3]),
        pytest.param("subprocess", *BAD[0], marks=pytest.mark.slow),
    ],
)
def test_bad_input(vectorization, more, message, tmp_path):
    if "tether/Rps-v0" not in gymnasium.registry:
        gymnasium.register("tether/Rps-v0", entry_point=Rps)
    options = [
        "env.train.id=tether/Allowed-v0", "env.train.total_num_envs=2", "trainer.logger=file", *MASKS,
        "actor_rollout_ref.actor.ppo_mini_batch_size=12", "trainer.test_freq=-1", "trainer.total_training_steps=2",
        f"trainer.default_local_dir={tmp_path}", f"env.train.vectorization={vectorization}", *more,
    ]  # fmt: skip
    with pytest.raises(ValueError, match=message):
        train(options)
