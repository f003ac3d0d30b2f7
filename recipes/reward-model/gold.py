"""What people would say of a note: the score that the reward model only estimates."""

PRAISE = ("brilliant", "calm", "clever", "elegant", "gentle", "honest", "lively", "warm")
OFTEN = 2
PENALTY = 0.5


def compute_score(data_source: str, solution_str: str, ground_truth: object, extra_info: object) -> dict[str, float]:
    """A point for each different word of praise, and half a point off for each word said a third time or more."""
    words = solution_str.split()
    repeated = sum(max(words.count(word) - OFTEN, 0) for word in set(words))
    score = len({word for word in words if word in PRAISE}) - PENALTY * repeated
    return {"score": score, "acc": score}  # acc is what validation watches
