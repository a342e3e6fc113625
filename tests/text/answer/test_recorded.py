from __future__ import annotations

import pytest
from canitoolcall.pytest_plugin import assert_conforms, assert_equivalent

from tests.text.answer.recorded import FAMILIES, cut, fixtures, parsed, units_of


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_outputs_are_parsed_as_their_models_meant_them(family):
    of_family = [fixture for fixture in fixtures() if fixture.family == family]
    assert len(of_family) > 20
    for fixture in of_family:
        assert_conforms(fixture, parsed(fixture, units_of(fixture)), soft=True)


@pytest.mark.parametrize("longest", [1, 7, 40])
def test_it_does_not_matter_how_recorded_outputs_are_cut(longest):
    for fixture in fixtures():
        units = units_of(fixture)
        assert_equivalent(parsed(fixture, units), parsed(fixture, cut(units, longest, longest)))


def test_nothing_of_a_call_that_the_token_limit_cut_off_is_given_out():
    cut_off = [fixture for fixture in fixtures() if fixture.truncated and fixture.expected_error]
    assert len(cut_off) > 15
    assert not any(parsed(fixture, units_of(fixture)).tool_calls for fixture in cut_off)
