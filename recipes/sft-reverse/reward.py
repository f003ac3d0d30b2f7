"""Scores the reversal of a word."""


def compute_score(data_source: str, solution_str: str, ground_truth: object, extra_info: object) -> dict[str, float]:
    """The share of letters in their places; acc is 1 where nothing is wrong, missing or added."""
    given, wanted = solution_str.split(), str(ground_truth).split()
    right = sum(letter == other for letter, other in zip(given, wanted, strict=False))
    return {"score": right / max(len(given), len(wanted)), "acc": float(given == wanted)}
