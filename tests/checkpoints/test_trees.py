"""Trees of known classes: what comes back is what was stored, and nothing else is stored or made."""

import dataclasses
import datetime
import io
import pickle

import numpy as np
import pytest
import torch

from tether.batch import KeptTokens, Prompt, RolloutBatch
from tether.checkpoints import as_bytes, from_tree, load_state, to_tree
from tether.text.rewards.outcome import Abstention, RewardError, Score

CLASSES = {kind.__name__: kind for kind in (KeptTokens, Prompt, RolloutBatch, Abstention, RewardError, Score)}


def batch() -> RolloutBatch:
    ids, lengths = torch.arange(6).view(2, 3), torch.tensor([3, 2])
    words = [torch.arange(4, dtype=torch.int32), torch.arange(2, dtype=torch.int32)]
    return RolloutBatch(
        uid=lengths, prompt_ids=ids, prompt_length=lengths, response_ids=ids, response_length=lengths,
        response_mask=ids > 1, rollout_log_probs=-ids.float(), truncated=lengths > 2,
        kept=KeptTokens(count=ids, words=words, batch_size=[2]), batch_size=[2],
    )  # fmt: skip


def stored(value, folder):
    (folder / "file.pt").write_bytes(as_bytes({"tree": to_tree(value, CLASSES)}))
    return from_tree(load_state(folder / "file.pt")["tree"], CLASSES)


def test_a_batch_with_its_details_comes_back(tmp_path):
    truth = {"x": np.array([1.5, 2.5]), "y": (1, None)}
    prompt = Prompt([1, 2], "s", truth, extra_info={"tests": np.array(["a", "b"])})
    value = {"batch": batch(), "outcomes": [Score(1.0, {"reason": "ok"}), Abstention(), RewardError("late")], 3: prompt}
    back = stored(value, tmp_path)
    assert list(back) == list(value)
    assert back["outcomes"] == value["outcomes"]
    assert back[3].token_ids.tolist() == [1, 2]
    assert back[3].ground_truth["x"].tolist() == [1.5, 2.5]
    assert back[3].ground_truth["y"] == (1, None)
    assert back[3].extra_info == {"tests": ["a", "b"]}
    for field in dataclasses.fields(RolloutBatch):
        one, other = getattr(value["batch"], field.name), getattr(back["batch"], field.name)
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other), field.name
            assert one.dtype == other.dtype
    assert [word.tolist() for word in back["batch"].kept.words] == [[0, 1, 2, 3], [0, 1]]


def test_objects_of_other_classes_are_neither_stored_nor_made():
    with pytest.raises(TypeError, match=r"datetime\.date is not stored in checkpoints"):
        to_tree([datetime.date(2026, 1, 1)], CLASSES)
    with pytest.raises(ValueError, match="not a stored object"):
        from_tree(("object", "Popen", None, [("args", "true")]), CLASSES)


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_in_its_place_runs_nothing(tmp_path):
    as_torch = io.BytesIO()
    torch.save({"tree": Runs(tmp_path / "ran")}, as_torch)
    for content in (pickle.dumps(Runs(tmp_path / "ran")), as_torch.getvalue()):
        (tmp_path / "file.pt").write_bytes(content)
        with pytest.raises(ValueError, match="damaged, or of another kind"):
            load_state(tmp_path / "file.pt")
    assert not (tmp_path / "ran").exists()
