"""What logs tell of errors."""

import pytest

from noria.service.log import why_not


@pytest.mark.parametrize("error", [ValueError("no such model"), OSError("no such model")])
def test_a_setting_that_cannot_be_served_is_told_in_its_own_words(error):
    assert why_not(error) == {"reason": "no such model"}


def test_a_defect_at_start_is_told_by_its_kind_and_place_alone():
    """Its text could hold anything of the model or of the machine."""
    try:
        {}["secret"]
    except KeyError as error:
        told = why_not(error)
    assert told["reason"] == "unexpected KeyError"
    assert "test_log.py" in told["where"][0]
    assert "secret" not in str(told)
