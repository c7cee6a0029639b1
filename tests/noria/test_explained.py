"""`noria chat --explain` against a service on loopback, as a person sees it."""

import pytest
from click.testing import CliRunner

from noria.cli.explained import explained_answer
from noria.cli.main import main
from noria.client.decode import TIMELINE_KEY
from noria.client.errors import QueueFullError
from noria.client.sync_client import Client
from noria.reasons import Reason, RequestError
from noria.service.errors import DETAILS_KEY, STATUS_OF, status_details
from noria.v1 import common_pb2
from tests.noria.fake_chat import REQUEST_ID, answer_events, refuse, text_event


@pytest.fixture
def noria(chat_service):
    def run(*arguments):
        address = ("--address", chat_service.address)
        return CliRunner().invoke(main, ["chat", *address, *arguments], env={"COLUMNS": "80"})

    return run


def test_the_answer_comes_first_then_its_life(noria, chat_service):
    result = noria("--explain", "Is it?")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "Yes, it is."
    assert f"The life of request {REQUEST_ID}" in [line.strip() for line in lines]
    assert chat_service.specs[0].trace_steps


def test_without_the_flag_nothing_is_traced(noria, chat_service):
    assert noria("q").stdout == "Yes, it is.\n"
    assert not chat_service.specs[0].HasField("trace_steps")


def test_all_steps_is_an_explain_too(noria):
    assert "The life of request" in noria("--all-steps", "q").stdout


def test_a_refusal_is_told_from_its_timeline_and_not_tried_again(noria, chat_service):
    error = RequestError(Reason.QUEUE_FULL, "64 of 64 places are taken", retry_after_s=0.01)
    told = common_pb2.Timeline(request_id=REQUEST_ID, total_us=700)
    told.phases.add(kind=common_pb2.PHASE_KIND_ADMISSION, duration_us=700)
    trailing = ((DETAILS_KEY, status_details(error)), (TIMELINE_KEY, told.SerializeToString()))

    def events(_spec, context):
        context.set_trailing_metadata(trailing)
        context.abort(STATUS_OF[error.reason], error.message)

    chat_service.events = events
    result = noria("--explain", "q")
    assert (result.exit_code, len(chat_service.specs)) == (1, 1)
    assert "key checked" in result.stdout
    assert "QUEUE_FULL: 64 of 64 places are taken" in result.stdout
    assert "start more workers" in result.stdout
    assert result.stderr.startswith("Error: QUEUE_FULL")


def test_a_refusal_without_a_timeline_tells_the_reason_alone(noria, chat_service):
    error = RequestError(Reason.INVALID_KEY, "no such key")
    chat_service.events = lambda _spec, context: refuse(context, error)
    result = noria("--explain", "q")
    assert "INVALID_KEY: no such key" in result.stdout
    assert "Where the time went" not in result.stdout


def test_nobody_at_the_address_is_told_too():
    arguments = ["chat", "--address", "127.0.0.1:1", "--explain", "q"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "that no router took" in result.stdout


def test_a_reply_and_a_question_cannot_steer_the_terminal(noria, chat_service):
    chat_service.events = lambda *_: answer_events("\x1b[2J\u202e[red]x[/red]")
    told = noria("--explain", "\x1b[2Jq").stdout.partition("The life of request")[2]
    assert "\x1b" not in told
    assert "\u202e" not in told
    assert '"\\u001b[2J\\u202e[red]x[/red]"' in told


def test_an_answer_broken_off_keeps_its_text_and_raises(chat_service, capsys):
    def events(_spec, context):
        yield text_event("half")
        refuse(context, RequestError(Reason.QUEUE_FULL, "m"))

    chat_service.events = events
    with Client(chat_service.address) as client, pytest.raises(QueueFullError):
        explained_answer(client, [("user", "q")], {})
    assert capsys.readouterr().out.startswith("half\n")
