"""What waits is bounded, and a closing is given up only where nothing else could be."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.ledger.buffer import RowBuffer
from router.ledger.row import SERVED, UsageRow


def row(number):
    return UsageRow(f"req-{number}", "r", "t", "k", "m", number)


def closing(number):
    return replace(row(number), outcome=SERVED)


def both(buffer):
    return buffer.openings(9), buffer.closings(9)


def test_a_closing_takes_the_place_of_its_waiting_opening():
    buffer = RowBuffer(10)
    buffer.open(row(1))
    buffer.close(closing(1))
    assert both(buffer) == ([], [closing(1)])


def test_an_opening_that_is_being_written_does_not_take_its_closing_along():
    buffer = RowBuffer(10)
    buffer.open(row(1))
    being_written = buffer.openings(9)
    buffer.close(closing(1))
    buffer.written(being_written)
    assert both(buffer) == ([], [closing(1)])


def test_openings_give_way_to_closings():
    buffer = RowBuffer(2)
    for number in range(3):
        buffer.open(row(number))
    assert len(buffer) == 2
    for number in (7, 8):
        buffer.close(closing(number))
    assert both(buffer) == ([], [closing(7), closing(8)])
    assert buffer.dropped == 0
    buffer.close(closing(9))
    assert (len(buffer), buffer.dropped) == (2, 1)


acts = st.lists(
    st.tuples(st.sampled_from(["open", "close", "write"]), st.integers(0, 9)), max_size=80
)


@given(acts, st.integers(1, 5))
def test_every_closing_is_written_or_counted_as_dropped(script, bound):
    buffer = RowBuffer(bound)
    written, closed = [], []
    for act, number in script:
        if act == "open" and number not in closed:
            buffer.open(row(number))
        elif act == "close" and number not in closed:
            closed.append(number)
            buffer.close(closing(number))
        elif act == "write":
            rows = buffer.closings(2)
            buffer.written([*buffer.openings(2), *rows])
            written += rows
        assert len(buffer) <= bound
    while rows := buffer.closings(9):
        written += rows
        buffer.written(rows)
    assert len(written) + buffer.dropped == len(closed)
    assert len({row.request_id for row in written}) == len(written)
