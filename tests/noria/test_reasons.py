"""One enum of reasons stands in the protos, in Python and in the client's exceptions."""

import inspect

import pytest

from noria.client.errors import ERROR_OF, LimitError
from noria.client.public import __all__ as exported
from noria.reasons import RETRY_OF, Reason, RequestError, Retry, invalid_field
from noria.service.errors import STATUS_OF
from noria.v1 import common_pb2


def test_python_and_proto_name_the_same_reasons():
    wire = {name.removeprefix("REASON_") for name, _ in common_pb2.Reason.items()}
    assert wire - {"UNSPECIFIED"} == {reason.value for reason in Reason}


def test_every_reason_has_a_status_and_says_whether_to_retry():
    assert set(STATUS_OF) == set(RETRY_OF) == set(Reason)


@pytest.mark.parametrize("reason", Reason)
def test_only_a_limit_promises_that_the_same_request_passes_after_a_delay(reason):
    is_limit = issubclass(ERROR_OF[reason], LimitError) and reason is not Reason.SLOW_READER
    assert (RETRY_OF[reason] is Retry.AFTER_DELAY) == is_limit


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_an_exported_exception_that_says_what_to_do(reason):
    cls = ERROR_OF[reason]
    assert cls.reason is reason
    assert cls.__name__ in exported
    assert len(inspect.getdoc(cls).split()) >= 8


def test_no_two_reasons_share_an_exception():
    assert len(set(ERROR_OF.values())) == len(Reason)


def test_a_bad_field_is_named_in_message_and_violation():
    error = invalid_field("top_p", "must be in (0, 1], got 2")
    assert isinstance(error, RequestError)
    assert error.message.startswith("top_p: ")
    assert error.fields == (("top_p", "must be in (0, 1], got 2"),)
