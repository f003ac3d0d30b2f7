import pickle

import pytest

from tether.text.data.sources import load_rows

SUMS = "reasoning_gym:chain_sum?size=20&seed=1&min_terms=2&max_terms=2&min_digits=1&max_digits=1"


def test_rows_carry_what_their_scorer_needs() -> None:
    rows = load_rows(SUMS)
    from reasoning_gym import create_dataset

    params = {"size": 20, "seed": 1, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = create_dataset("chain_sum", **params)
    assert len(rows) == 20
    for index, row in enumerate(rows):
        assert row.data_source == "reasoning_gym/chain_sum"
        assert row.messages == ({"role": "user", "content": task[index]["question"]},)
        assert row.ground_truth == task[index]["answer"]
        assert row.extra_info == {
            "split": "generated",
            "index": index,
            "reasoning_gym": {
                "task": "chain_sum",
                "params": params,
                "entry": task[index],
                "extract": "answer_tag",
            },
        }
        assert task.score_answer(row.ground_truth, row.extra_info["reasoning_gym"]["entry"]) == 1.0


def test_the_text_around_the_question_and_the_extraction_are_options() -> None:
    row = load_rows(SUMS + "&system=Be%20brief.&suffix=%0ANumber%20only.&extract=last_number")[3]
    assert row.messages[0] == {"role": "system", "content": "Be brief."}
    assert row.messages[1]["content"] == load_rows(SUMS)[3].messages[0]["content"] + "\nNumber only."
    assert row.extra_info["reasoning_gym"]["extract"] == "last_number"
    assert set(row.extra_info["reasoning_gym"]["params"]).isdisjoint({"system", "suffix", "extract"})


@pytest.mark.parametrize("task", ["word_ladder", "list_functions", "acre", "gsm_symbolic"])
def test_tasks_of_a_fixed_number_of_entries_have_both_parts(task: str) -> None:
    """They refuse an index beyond the size that they were made with."""
    parts = [load_rows(f"reasoning_gym:{task}?part={part}&size=3") for part in ("train", "test")]
    train, test = ({row.messages[0]["content"] for row in rows} for rows in parts)
    assert [len(rows) for rows in parts] == [3, 3]
    assert not train & test


def test_the_seed_is_fixed_unless_given() -> None:
    def answers(query: str) -> list[str]:
        return [row.ground_truth for row in load_rows(f"reasoning_gym:chain_sum?size=10{query}")]

    assert answers("") == answers("&seed=0") != answers("&seed=5")


def test_parameters_that_are_no_numbers() -> None:
    row = load_rows("reasoning_gym:chain_sum?size=2&allow_negation=True")[0]
    assert row.extra_info["reasoning_gym"]["params"]["allow_negation"] is True


def test_entries_survive_the_way_to_a_reward_process_unchanged() -> None:
    """graph_color's metadata has numbers as keys, which json would turn into text; and it has no single answer."""
    row = load_rows("reasoning_gym:graph_color?size=1&seed=3")[0]
    from reasoning_gym import create_dataset

    entry = create_dataset("graph_color", size=1, seed=3)[0]
    assert row.ground_truth is None
    assert pickle.loads(pickle.dumps(row.extra_info))["reasoning_gym"]["entry"] == entry


def test_held_out_questions_are_distinct_and_training_ones_may_repeat() -> None:
    def questions(part: str, size: int) -> list[str]:
        rows = load_rows(f"{SUMS.replace('size=20', f'size={size}')}&part={part}")
        return [row.messages[-1]["content"] for row in rows]

    test, train = questions("test", 25), questions("train", 400)
    assert len(test) == len(set(test)) == 25
    assert len(train) == 400 > len(set(train))
    assert not set(test) & set(train)


def test_more_held_out_questions_than_a_task_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"256 distinct test questions are asked for and only \d\d were found"):
        load_rows(f"{SUMS.replace('size=20', 'size=256')}&part=test")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("reasoning_gym:chain_sun", "no task `chain_sun`. Did you mean chain_sum?"),
        ("reasoning_gym:chain_sum?min_term=2", "no parameter `min_term`; it has .* Did you mean min_terms?"),
        ("reasoning_gym:chain_sum?min_terms=5&max_terms=2", "refuses its parameters: max_terms must be >= min_terms"),
        ("reasoning_gym:chain_sum?min_terms=two", "refuses its parameters:"),
        (
            "reasoning_gym:chain_sum?extract=json",
            "extract is `json`; it may be answer_tag, last_number, first_word, full",
        ),
        ("reasoning_gym:chain_sum?size=0", "no rows|refuses its parameters"),
    ],
)
def test_refusals(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        load_rows(spec)
    assert str(caught.value).startswith(f"{spec}: ")
