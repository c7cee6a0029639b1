"""A row comes back from its text as it was, also from one of another version."""

import json
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from router.ledger.prices import Price
from router.ledger.row import UsageRow, day_of, decode_row, encode_row

prices = st.none() | st.builds(
    Price, st.just("EUR"), *[st.decimals(0, 1000, places=6) for _ in range(3)]
)
rows = st.builds(UsageRow, *[st.text(max_size=9)] * 5, st.integers(0, 2**50), prices)


@given(rows)
def test_a_row_comes_back_from_its_text(row):
    assert decode_row(encode_row(row)) == row


def test_fields_of_a_later_version_are_passed_over_and_absent_ones_are_zero():
    row = UsageRow("req", "r", "t", "k", "m", 5)
    text = json.dumps(json.loads(encode_row(row)) | {"later": 1})
    assert decode_row(text) == row
    assert row.cost is None


def test_a_row_is_of_the_day_in_utc_on_which_it_began():
    assert day_of(0) == "1970-01-01"
    assert day_of(24 * 3600 * 10**6 - 1) == "1970-01-01"
    assert day_of(24 * 3600 * 10**6) == "1970-01-02"


def test_only_what_was_delivered_is_charged_and_the_rest_is_waste():
    price = Price("EUR", Decimal(1), Decimal("0.5"), Decimal(2))
    row = UsageRow(
        "req", "r", "t", "k", "m", 5, price,
        prompt_tokens=10, cached_tokens=4, generated_tokens=9, delivered_tokens=3,
    )  # fmt: skip
    assert row.wasted_tokens == 6
    assert row.cost == (Decimal(6) + Decimal(2) + Decimal(6)) / 10**6
