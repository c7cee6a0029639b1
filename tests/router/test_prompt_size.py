"""Texts that no way of cutting them could fit are refused before they are cut."""

import grpc
import pytest

from noria.reasons import Reason, RequestError
from router.prompt_size import check_fits
from router.requests import Conversation, RawText, Turn
from tests.router.fakes import FakeTokenizer, FakeWorker, failure, routed
from tests.support.canary import CANARY

CHAT = Conversation("é", (Turn("user", ("abc", "d")), Turn("assistant", ("efg",))))


def test_as_many_bytes_as_the_context_can_spell_are_let_through():
    check_fits(CHAT, 3, 3)
    check_fits(RawText("é" * 4), 2, 4)


@pytest.mark.parametrize(
    ("prompt", "field", "size"), [(CHAT, "messages", 9), (RawText("é" * 5), "text", 10)]
)
def test_one_byte_more_is_refused_with_both_numbers(prompt, field, size):
    with pytest.raises(RequestError, match=f"^{field}: {size} bytes .* holds 8$") as caught:
        check_fits(prompt, 4, 2)
    assert caught.value.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert caught.value.fields[0][0] == field


@pytest.mark.parametrize("known", [(0, 5), (5, 0)])
def test_what_is_not_known_refuses_nothing(known):
    """A tokenizer of an earlier version does not tell its longest token."""
    check_fits(RawText("a" * 1000), *known)


async def test_a_client_hears_of_it_and_the_tokenizer_does_not():
    """The longest context of the workers counts, and the tokenizer's longest token."""
    tokenizer = FakeTokenizer()
    tokenizer.max_piece_bytes = 3
    workers = [FakeWorker(max_model_len=20), FakeWorker(max_model_len=10)]
    async with routed(*workers, tokenizer=tokenizer) as setup:
        code, error = await failure(setup.stream("x" * (61 - len(CANARY))))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.reason is Reason.CONTEXT_LENGTH_EXCEEDED
        assert "61 bytes of text" in error.message
        assert setup.tokenizer.encoded == []
        await failure(setup.stream("x" * (60 - len(CANARY))))
        assert len(setup.tokenizer.encoded) == 1
