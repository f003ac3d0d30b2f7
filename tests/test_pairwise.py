"""The cover of pairs: complete, and small. Nothing else would notice combinations that silently leave the default."""

import itertools

from tests.pairwise import in_turn, in_turn_parameters, pairs_of, pairwise, pairwise_parameters


def test_every_pair_of_values_is_covered_by_few_cases():
    cases = list(itertools.product("abcd", range(3), (False, True), ("x", "y", "z")))
    cover = list(pairwise(cases))
    assert set().union(*map(pairs_of, cover)) == set().union(*map(pairs_of, cases))
    assert len(cover) <= 16 < len(cases) == 72


def test_what_the_cover_leaves_out_is_slow():
    parameters = pairwise_parameters("ab", range(2), "xy")
    assert [parameter.values for parameter in parameters] == list(itertools.product("ab", range(2), "xy"))
    assert 4 <= sum(not parameter.marks for parameter in parameters) < 8


def test_in_turn_every_value_has_a_case():
    cases = in_turn("abcdef", range(3), "xy")
    assert [set(values) for values in zip(*cases, strict=True)] == [set("abcdef"), set(range(3)), set("xy")]
    assert len(set(cases)) == len({(number, letter) for _, number, letter in cases}) == 6
    parameters = in_turn_parameters("abcdef", range(3), "xy")
    assert {parameter.values for parameter in parameters if not parameter.marks} == set(cases)
    assert len(parameters) == 36
