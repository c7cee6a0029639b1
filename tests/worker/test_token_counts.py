"""Counts are a function of prompt and output, however they came about."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from worker.token_counts import TokenCounts

IDS = st.lists(st.integers(0, 300), max_size=200)


def as_dict(counts):
    return dict(zip(counts.ids.tolist(), counts.output_counts.tolist(), strict=True))


@given(prompt=IDS, output=IDS, cut=st.integers(0, 200))
def test_counts_grown_one_by_one_equal_counts_made_at_once(prompt, output, cut):
    """Every distinct id stands once, with its occurrences in the output alone."""
    grown = TokenCounts(prompt, output[:cut])
    for token_id in output[cut:]:
        grown.add(token_id)
    expected = dict.fromkeys(prompt, 0.0) | dict(Counter(output))
    assert as_dict(grown) == as_dict(TokenCounts(prompt, output)) == expected
