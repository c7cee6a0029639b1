"""Deadlines come in order, once each, and leave nothing behind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.deadlines import Deadlines


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "due"]), st.integers(0, 30))))
def test_it_tells_what_a_plain_dict_would(operations):
    """SCH-08: and its heap never holds many more than are awaited."""
    deadlines, plain = Deadlines(), {}
    for at, (operation, value) in enumerate(operations):
        if operation == "add":
            plain[at] = float(value)
            deadlines.add(float(value), at)
        elif operation == "discard":
            plain.pop(value, None)
            deadlines.discard(value)
        else:
            due = sorted((deadline, i) for i, deadline in plain.items() if deadline <= value)
            plain = {i: deadline for i, deadline in plain.items() if deadline > value}
            assert list(deadlines.take_due(float(value))) == [i for _, i in due]
        assert len(deadlines) == len(plain)


@pytest.mark.parametrize("live", [0, 500])
def test_ten_thousand_that_ended_early_are_forgotten(live):
    deadlines = Deadlines()
    for sequence_id in range(10_000):
        deadlines.add(600.0, sequence_id)
        if sequence_id >= live:
            deadlines.discard(sequence_id)
    assert len(deadlines._heap) <= 2 * live + 100
    assert len(list(deadlines.take_due(600.0))) == live
