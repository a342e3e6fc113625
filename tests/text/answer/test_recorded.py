from __future__ import annotations

import pytest
from canitoolcall.pytest_plugin import assert_conforms, assert_equivalent

from tests.text.answer.recorded import FAMILIES, cut, fixtures, parsed, units_of

FIRST_IS_COMPLETE = "llama/l4-truncated-missing-close-bracket"
"""A list that was cut off in its second call; its first one counts, as in every other format, since
streams have sent it. (The record calls the whole list an error.)"""


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_outputs_are_parsed_as_their_models_meant_them(family):
    of_family = [fixture for fixture in fixtures() if fixture.family == family]
    assert len(of_family) > 20
    for fixture in of_family:
        if fixture.id == FIRST_IS_COMPLETE:
            continue
        assert_conforms(fixture, parsed(fixture, units_of(fixture)), soft=True)


@pytest.mark.parametrize("longest", [pytest.param(1, marks=pytest.mark.slow), 7, 40])
def test_it_does_not_matter_how_recorded_outputs_are_cut(longest):
    for fixture in fixtures():
        units = units_of(fixture)
        assert_equivalent(parsed(fixture, units), parsed(fixture, cut(units, longest, longest)))


def test_nothing_of_a_call_that_the_token_limit_cut_off_is_given_out():
    cut_off = [fixture for fixture in fixtures() if fixture.truncated and fixture.expected_error]
    assert len(cut_off) > 15
    calls = {fixture.id: parsed(fixture, units_of(fixture)).tool_calls for fixture in cut_off}
    assert [call.name for call in calls.pop(FIRST_IS_COMPLETE)] == ["get_weather"]
    assert not any(calls.values())
