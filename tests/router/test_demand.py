"""What is asked of limits before a prompt is ids."""

import pytest

from noria.reasons import Reason, RequestError
from router.demand import attainable, counting_ask, generation_ask
from router.limit_decision import Ask
from router.registry import ModelLimits
from router.requests import Conversation, GenerationInput, RawIds, RawText, Sampling, Turn
from router.tenant_limits import TenantLimits

MODEL = ModelLimits("m", max_model_len=1000, default_max_tokens=0)


def wanted(prompt, max_tokens=None, num_choices=1):
    return GenerationInput(
        "m", prompt, max_tokens, Sampling(), None, (), 0, False, True, num_choices
    )


def asked(*chat, model=MODEL):
    return generation_ask(wanted(*chat), model)


def test_ids_are_priced_exactly():
    assert asked(RawIds([1] * 30), 70, 2) == Ask(1, 2, 0, 30 + 140, 30 + 140)


def test_a_text_needs_an_eighth_of_its_bytes_at_least_and_usually_a_third():
    text = "ä" * 120
    assert asked(RawText(text), 10) == Ask(1, 1, 1, 30 + 10, 80 + 10)
    turns = (Turn("user", (text[:60], text[60:])), Turn("assistant", ("",)))
    assert asked(Conversation("", turns), 10).needed == 40
    assert asked(Conversation("", turns), 10).wanted == 80 + 3 * 16 + 10


@pytest.mark.parametrize(("default", "output"), [(0, 900), (64, 64), (5000, 900)])
def test_without_max_tokens_the_model_s_default_is_reserved_and_little_of_it_needed(
    default, output
):
    model = ModelLimits("m", max_model_len=1000, default_max_tokens=default)
    assert asked(RawText("x" * 300), model=model) == Ask(1, 1, 1, 37 + 1, 100 + output)


def test_a_text_too_long_for_the_context_is_still_asked_for():
    assert asked(RawText("x" * 9000)) == Ask(1, 1, 1, 1125 + 1, 3000 + 1)


def test_counting_takes_no_tokens():
    assert counting_ask(RawText("x" * 800)) == Ask(1, 1, 1)
    assert counting_ask(RawIds([1])) == Ask(1, 1, 0)


@pytest.mark.parametrize(
    ("chat", "limits", "field"),
    [
        ((RawIds([1] * 30), 71), TenantLimits(tokens_per_minute=100), "max_tokens"),
        ((RawText("x"), 101), TenantLimits(tokens_per_minute=100), "max_tokens"),
        ((RawText("x"), 51, 2), TenantLimits(tokens_per_minute=100), "max_tokens"),
        ((RawText("x"), 1, 3), TenantLimits(concurrent_requests=2), "n"),
    ],
)
def test_what_can_never_pass_is_told_by_its_field(chat, limits, field):
    with pytest.raises(RequestError) as caught:
        attainable(asked(*chat), wanted(*chat), limits)
    assert caught.value.reason is Reason.LIMIT_UNATTAINABLE
    assert [name for name, _ in caught.value.fields] == [field]


def test_a_text_that_may_have_few_tokens_waits_for_a_full_bucket_at_most():
    """Blanks may be one token for many bytes: nobody knows yet that it can never pass."""
    chat, limits = (RawText(" " * 8000), 1), TenantLimits(tokens_per_minute=100)
    assert attainable(asked(*chat), wanted(*chat), limits) == Ask(1, 1, 1, 100, 100)


@pytest.mark.parametrize("chat", [(RawIds([1] * 30), 70), (RawText("x" * 800), 0, 2)])
def test_what_just_fits_passes_as_it_is(chat):
    limits = TenantLimits(1, 102, 2, 1)
    assert attainable(asked(*chat), wanted(*chat), limits) == asked(*chat)
