"""Exported policies answer as `predict` does, on observations as the environment gives them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")
from gymnasium import spaces  # noqa: E402

from tether.control.collecting.agent import EnvAgent  # noqa: E402
from tether.control.envs.conversion import ActionCodec, ObservationReader  # noqa: E402
from tether.control.envs.protocol import choices_of  # noqa: E402
from tether.control.envs.spaces import spaces_as_json, spaces_from_json  # noqa: E402
from tether.control.policies.export import export_policy  # noqa: E402
from tether.control.policies.mlp_policy import load_policy, make_policy, save_policy  # noqa: E402
from tether.control.policies.spec import PolicySpec  # noqa: E402
from tether.observations import row_width  # noqa: E402

ROWS = 1000
PAGE = Path(__file__).parents[3] / "docs/guides/deployment.md"
NUMBERS = spaces.Box(-np.inf, np.inf, (5,), np.float64)
PICTURE = spaces.Box(0, 255, (9, 8, 3), np.uint8)
FRAMES = spaces.Box(0, 255, (2, 3, 12, 10), np.uint8)  # two frames of three channels, channels first
NESTED = spaces.Dict(
    a=spaces.MultiDiscrete([3, 2], start=[1, 0]),
    b=spaces.Tuple([spaces.Discrete(4, start=-1), spaces.Box(-2, np.array([1, np.inf], np.float32))]),
    flags=spaces.MultiBinary(3),
    seen=PICTURE,
)
MASKED = spaces.Dict(action_mask=spaces.MultiBinary(5), x=NUMBERS)
BOUNDED = spaces.Box(-0.3, np.array([[0.2, np.inf]]), dtype=np.float64)
MIXED = spaces.Dict(
    arm=BOUNDED,
    gripper=spaces.Discrete(3, start=1),
    more=spaces.Tuple([spaces.Box(-9, 9, (1,)), spaces.MultiBinary(1)]),
)
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mlp": (NUMBERS, BOUNDED, {"normalize_observations": True, "clip_observations": 2.0}),
    "mlp of everything": (NESTED, spaces.MultiDiscrete([3, 2], start=[0, 5]), {"activation": "elu"}),
    "cnn": (PICTURE, spaces.Discrete(4, start=2), {"cnn": True, "activation": "relu"}),
    "cnn of frames": (FRAMES, spaces.MultiBinary(3), {"cnn": True, "pixel_scale": 10.0}),
    "cnn and lstm": (NESTED, BOUNDED, {"cnn": True, "lstm_dim": 4, "normalize_observations": True}),
    "lstm": (NUMBERS, spaces.Discrete(3), {"lstm_dim": 4}),
    "masks": (MASKED, spaces.MultiDiscrete([3, 2]), {}),
    "noise by state": (NUMBERS, BOUNDED, {"use_sde": True}),
    "parts": (MASKED, MIXED, {}),
    "parts of one kind": (NUMBERS, spaces.Tuple([BOUNDED, spaces.Box(-9, 9, (1,))]), {"use_sde": True}),
    "chunks": (NUMBERS, BOUNDED, {"num_action_chunks": 3}),
}


def make(case: str) -> Any:
    """A policy for these spaces with weights that make its actions differ."""
    observations, actions, options = CASES[case]
    layout, spec = ObservationReader(observations, "toy").layout, ActionCodec.of(actions, "toy").spec
    options = dict(options)
    pictures = tuple(part.name for part in layout if part.kind == "image") if options.pop("cnn", False) else ()
    policy = make_policy(
        PolicySpec(
            obs_dim=row_width(tuple(part for part in layout if part.name not in pictures)),
            choices=choices_of(spec) or None,
            action_width=spec.width, layout=layout, pictures=pictures, hidden_dim=8, num_layers=2, **options,
        ),
        seed=0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    if policy.normalizer:
        policy.normalizer.update(1 + 2 * torch.randn(50, len(policy.normalizer.mean), generator=generator))
    policy.spaces = spaces_as_json((observations, actions))
    return policy


def drawn(space: Any, name: str = "") -> Any:
    """Observations of a space, and the same by the names of its fields."""
    rng = np.random.default_rng(1)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        parts = {key: drawn(each, f"{name}.{key}".strip(".")) for key, each in inner}
        whole = {key: part for key, (part, _) in parts.items()}
        flat = {key: part for _, fields in parts.values() for key, part in fields.items()}
        return (whole if isinstance(space, spaces.Dict) else tuple(whole.values())), flat
    space.seed(2)
    values = np.stack([space.sample() for _ in range(ROWS)])
    if name == "action_mask":
        values[:, [0, 3]] = 1
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        values = rng.normal(1, 3, values.shape).astype(space.dtype)
    return values, {name or ("image" if values.dtype == np.uint8 else "state"): values}


def by_name(actions: Any, name: str) -> Any:
    if not isinstance(actions, dict | tuple):
        return [(name, actions)]
    parts = actions.items() if isinstance(actions, dict) else enumerate(actions)
    return [pair for key, part in parts for pair in by_name(part, f"{name}.{key}")]


def expected(policy: Any, whole: Any, steps: int) -> list[Any]:
    """What `predict` answers, with the memory of steps before."""
    observations, actions = spaces_from_json(policy.spaces)
    agent = EnvAgent(policy, observations, actions, "toy")
    return [agent.predict(whole) for _ in range(steps)]


def test_spaces_are_those_that_were_saved(tmp_path: Path) -> None:
    policy = make("cnn and lstm")
    save_policy(policy, tmp_path / "policy")
    assert "Infinity" not in (tmp_path / "policy/policy.json").read_text()
    loaded = load_policy(tmp_path / "policy")
    assert loaded.spaces is not None
    assert spaces_from_json(loaded.spaces) == (NESTED, BOUNDED)
    texts = spaces.Text(7), spaces.Box(np.array([0, 3]), np.array([9, 2**62]), dtype=np.int64)
    again = spaces_from_json(spaces_as_json(texts))
    assert (again[0].max_length, again[1]) == (7, texts[1])


@pytest.mark.parametrize("case", CASES)
def test_onnx_is_equal_to_predict(case: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    policy, chunk = make(case), CASES[case][2].get("num_action_chunks", 1)
    export_policy(policy, "onnx", tmp_path / "policy.onnx")
    session = runtime.InferenceSession(str(tmp_path / "policy.onnx"), providers=["CPUExecutionProvider"])
    whole, fields = drawn(CASES[case][0])
    if case == "mlp":
        with pytest.raises(Exception, match="for input: state") as refused:
            session.run(None, {"state": fields["state"][:, :1]})
        assert "Expected: 5" in str(refused.value)
    memory = {}
    steps = expected(policy, whole, max(chunk, 3 if "lstm" in case else 1))
    if "lstm" in case:
        memory = {"memory_in": np.zeros((ROWS, 8), np.float32)}
    for index, wanted in enumerate(steps):
        names = [output.name for output in session.get_outputs()]
        actions = dict(zip(names, session.run(None, fields | memory), strict=True))
        memory = {"memory_in": actions.pop("memory_out")} if memory else {}
        parts = dict(by_name(wanted, "action"))
        assert actions.keys() == parts.keys()
        for name, part in parts.items():
            action = actions[name][:, index] if chunk > 1 else actions[name]
            assert (action.shape, action.dtype) == (part.shape, part.dtype)
            np.testing.assert_allclose(action, part, rtol=0, atol=2e-5 if action.dtype.kind == "f" else 0)
            assert len(np.unique(action)) > 1
    if isinstance(CASES[case][1], spaces.Box) and chunk == 1:
        assert (action == -0.3).any()  # a bound of the space


@pytest.mark.parametrize("case", CASES)
def test_the_first_lines_of_the_page_run_with_any_policy(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    (code,) = re.findall(r'^python -c "\n(.*?)"$', PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    export_policy(make(case), "onnx", tmp_path / "policy.onnx")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    names = [*drawn(CASES[case][0])[1], *(["memory_in"] if "lstm" in case else [])]
    *inputs, action = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(f"{name} ['N'") for line in inputs) for name in names)
    assert action


def test_numpy_alone_refuses_an_observation_of_several_parts(tmp_path: Path) -> None:
    export_policy(make("masks"), "npz", tmp_path / "policy.npz")
    with pytest.raises(
        ValueError, match=r"the parts \['action_mask', 'x'\], these lines read one; export it --to onnx"
    ):
        numpy_alone()["load"](tmp_path / "policy.npz")


def numpy_alone() -> dict[str, Any]:
    """The code of the page on deployment."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    defined: dict[str, Any] = {}
    exec(code, defined)
    return defined


@pytest.mark.parametrize("case", ["mlp", "cnn", "lstm"])
def test_numpy_alone_is_equal_to_predict(case: str, tmp_path: Path) -> None:
    policy, defined = make(case), numpy_alone()
    export_policy(policy, "npz", tmp_path / "policy.npz")
    whole, _ = drawn(CASES[case][0])
    loaded, memory = defined["load"](tmp_path / "policy.npz"), np.zeros((ROWS, 8), np.float32)
    for other in (whole[0], whole[..., :1]):  # NumPy would broadcast a single number
        with pytest.raises(ValueError, match=r"observations: shape \(.*\); give \('N', "):
            defined["act"](loaded, other, memory)
    for wanted in expected(policy, whole, 3):
        action, memory = defined["act"](loaded, whole, memory)
        np.testing.assert_allclose(action, wanted, rtol=0, atol=2e-5 if action.dtype.kind == "f" else 0)


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    policy = make("mlp")
    policy.spaces = None
    with pytest.raises(ValueError, match=r"--to: the checkpoint was saved without the spaces .* one more step"):
        export_policy(policy, "npz", tmp_path / "policy.npz")
    assert not (tmp_path / "policy.npz").exists()
