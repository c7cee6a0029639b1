"""Prices are decimals; a file that says anything else is refused by field."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.ledger.prices import Price, PricesError, parse_prices, read_prices

GOOD = """
currency = "EUR"
[[models]]
name = "chat"
input = "0.15"
cached_input = "0.075"
output = "0.60"
[[models]]
name = "large"
input = 2
output = "8.000001"
"""


def test_a_file_gives_a_price_for_each_model(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text(GOOD)
    large = Price("EUR", Decimal(2), Decimal(2), Decimal("8.000001"))
    assert read_prices(path) == {
        "chat": Price("EUR", Decimal("0.15"), Decimal("0.075"), Decimal("0.60")),
        "large": large,
    }
    assert read_prices(None) == {}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("0.15", "-1"), "models[0].input"),
        (("0.15", "1e3"), "models[0].input"),
        (("0.15", "0.1234567"), "models[0].input"),
        (("0.15", "٣"), "models[0].input"),
        (('"0.15"', "0.15"), "models[0].input"),
        (('"0.15"', "true"), "models[0].input"),
        (('output = "0.60"', ""), "models[0].output"),
        (('"0.075"', '""'), "models[0].cached_input"),
        (("EUR", "euro"), "currency"),
        (('currency = "EUR"', ""), "currency"),
        (("cached_input", "cache"), "models[0]: only"),
        (('"large"', '"chat"'), "models[1].name"),
        (('"large"', '""'), "models[1].name"),
        (('currency = "EUR"', 'currency = "EUR"\nmodel = 1'), "only currency"),
        (("[[models]]", "[[models"), "not TOML"),
    ],
)
def test_what_cannot_be_a_price_is_refused_by_field(change, problem):
    with pytest.raises(PricesError) as caught:
        parse_prices(GOOD.replace(*change, 1).encode())
    assert problem in str(caught.value)


def test_neither_a_huge_file_nor_other_bytes_are_read(tmp_path):
    path = tmp_path / "prices.toml"
    for content in (b"#" * (1 << 20) + b"#", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(PricesError):
            read_prices(path)


amounts = st.decimals(0, Decimal("999999.999999"), places=6)
tokens = st.integers(0, 10**14)


@given(amounts, amounts, amounts, tokens, tokens, tokens)
def test_cost_is_exact_and_adds_up(given_, cached_, output, prompt, cached, out):
    """What two requests cost together is what their tokens together cost, to the last digit."""
    price = Price("EUR", given_, cached_, output)
    prompt += cached
    twice = price.cost(2 * prompt, 2 * cached, 2 * out)
    once = price.cost(prompt, cached, out)
    assert once + once == twice
    assert once * 10**6 == (prompt - cached) * given_ + cached * cached_ + out * output
