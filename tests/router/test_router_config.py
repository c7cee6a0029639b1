"""A wrong configuration is refused before anything starts, naming the flag."""

import pytest

from router.config import RouterConfig

GOOD = {"tokenizers": ("t:1",), "workers": ("w:1",), "api_key_sha256": "A1" * 32}


def test_a_plain_configuration_is_accepted():
    assert RouterConfig(**GOOD).default_deadline_s == 600.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"api_key_sha256": "a1"}, "api-key-sha256"),
        ({"api_key_sha256": "x" * 64}, "api-key-sha256"),
        ({"tokenizers": ()}, "tokenizer: 0 addresses"),
        ({"tokenizers": ("t:1", "t:1")}, "tokenizer: the same address twice"),
        ({"workers": ()}, "worker"),
        ({"workers": ("w:1", "w:1")}, "worker"),
        ({"max_queued_requests": 0}, "max-queued-requests"),
        ({"max_queued_tokens": 0}, "max-queued-tokens"),
        ({"default_deadline_s": 0.0}, "default-deadline-s"),
        ({"default_deadline_s": float("nan")}, "default-deadline-s"),
        ({"default_deadline_s": float("inf")}, "default-deadline-s: inf; above 0, at most 604800"),
        ({"max_connection_age_s": 2**31 / 1000}, "max-connection-age-s"),
    ],
)
def test_a_value_out_of_range_is_named(change, named):
    with pytest.raises(ValueError, match=named):
        RouterConfig(**{**GOOD, **change})
