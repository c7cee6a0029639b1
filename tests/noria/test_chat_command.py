"""`noria chat` against a service on loopback, as a person sees it."""

import pytest
from click.testing import CliRunner

from noria.cli import chat as chat_module
from noria.cli.chat import converse, stream_answer
from noria.cli.main import main
from noria.cli.terminal import one_line, printable
from noria.client.sync_client import Client
from noria.reasons import Reason, RequestError
from noria.v1 import chat_pb2
from tests.noria.fake_chat import REQUEST_ID, answer_events, refuse


@pytest.fixture
def noria(chat_service):
    def run(*arguments, **options):
        address = ("--address", chat_service.address)
        return CliRunner().invoke(main, ["chat", *address, *arguments], **options)

    return run


def asked(spec):
    return [(chat_pb2.Role.Name(m.role), m.content[0].text.text) for m in spec.messages]


def test_the_answer_goes_to_stdout(noria):
    result = noria("Is it?")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Yes, it is.\n", "")


def test_the_answer_is_repeated_on_one_line_when_asked(noria, chat_service):
    chat_service.events = lambda *_: answer_events("Yes,\n\n", "it is.\n")
    assert noria("q", "--answer-line").stdout.splitlines()[-1] == "answer: Yes, it is."


def test_options_reach_the_server_and_absent_ones_stay_absent(noria, chat_service):
    noria("q")
    noria("q", "--system", "s", "--max-tokens", "5", "--temperature", "0", "--seed", "-3")
    bare, full = chat_service.specs
    assert not bare.HasField("system")
    assert not bare.sampling.HasField("temperature")
    assert (full.system, full.max_tokens) == ("s", 5)
    assert (full.sampling.temperature, full.sampling.seed) == (0.0, -3)


@pytest.mark.parametrize(
    ("arguments", "kind", "value"),
    [
        (("--json-object",), "json_object", True),
        (("--regex", "a|b"), "regex", "a|b"),
        (("--choice", "no", "--choice", "yes"), "choice", ["no", "yes"]),
    ],
)
def test_the_form_of_the_answer_reaches_the_server(noria, chat_service, arguments, kind, value):
    assert noria("q", *arguments).exit_code == 0
    output = chat_service.specs[0].sampling.structured_output
    assert output.WhichOneof("grammar") == kind
    got = getattr(output, kind)
    assert (list(got.choices) if kind == "choice" else got) == value


def test_a_schema_is_read_from_its_file(noria, chat_service, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"title": "größe"}', encoding="utf-8")
    noria("q", "--json-schema", str(schema))
    sent = chat_service.specs[0].sampling.structured_output
    assert sent.json_schema == '{"title": "größe"}'
    schema.write_bytes(b"{\xff}")
    for arguments in (("--json-schema", str(schema)), ("--regex", "a", "--choice", "b")):
        refused = noria("q", *arguments)
        assert refused.exit_code != 0
        assert arguments[-2] in refused.stderr or "choice: not together" in refused.stderr
    assert len(chat_service.specs) == 1


def test_what_is_piped_in_is_one_question(noria, chat_service):
    assert noria(input="first line\nsecond line\n").exit_code == 0
    assert asked(chat_service.specs[0]) == [("ROLE_USER", "first line\nsecond line")]


def test_no_question_at_all_is_said(noria):
    result = noria(input="")
    assert result.exit_code == 1
    assert "no question" in result.stderr


def test_an_error_is_one_plain_line_with_reason_and_request_id(noria, chat_service):
    error = RequestError(Reason.QUEUE_FULL, "64 of 64 places are taken")
    chat_service.events = lambda _spec, context: refuse(context, error)
    result = noria("q")
    assert result.exit_code == 1
    line = f"Error: QUEUE_FULL: 64 of 64 places are taken (request {REQUEST_ID})\n"
    assert result.stderr == line


def test_nobody_at_the_address_is_one_plain_line_that_says_what_to_do():
    result = CliRunner().invoke(main, ["chat", "--address", "127.0.0.1:1", "q"])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: no server answers at 127.0.0.1:1; `noria up`")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--max-tokens", "-1"], "max_tokens"), (["--address", "x"], "address")],
)
def test_bad_input_is_named(noria, arguments, named):
    result = noria("q", *arguments)
    assert result.exit_code == 1
    assert named in result.stderr


@pytest.fixture
def say(monkeypatch):
    """What the person types next, in order; then the end of the input."""

    def lines(*typed):
        remaining = iter(typed)
        monkeypatch.setattr(chat_module, "_next_question", lambda: next(remaining, ""))

    return lines


def test_a_conversation_carries_its_turns(chat_service, say, capsys):
    say("q1", "q2")
    with Client(chat_service.address) as client:
        converse(client, {})
    assert [role for role, _ in asked(chat_service.specs[1])] == [
        "ROLE_USER", "ROLE_ASSISTANT", "ROLE_USER",
    ]  # fmt: skip
    assert asked(chat_service.specs[1])[1][1] == "Yes, it is."
    assert capsys.readouterr().out == "Yes, it is.\nYes, it is.\n"


def test_a_turn_that_failed_is_no_part_of_the_next(chat_service, say, capsys):
    error = RequestError(Reason.NO_WORKER, "none")

    def events(spec, context):
        if spec.messages[-1].content[0].text.text == "bad":
            refuse(context, error)
        return answer_events("fine")

    chat_service.events = events
    say("bad", "good")
    with Client(chat_service.address) as client:
        converse(client, {})
    assert asked(chat_service.specs[1]) == [("ROLE_USER", "good")]
    assert "NO_WORKER" in capsys.readouterr().err


def test_ctrl_c_during_an_answer_cancels_that_answer_alone(chat_service, say, monkeypatch, capsys):
    chat_service.hold("a")
    pieces = iter([KeyboardInterrupt])

    def write_piece(_text):
        for interruption in pieces:
            raise interruption

    monkeypatch.setattr(chat_module, "write_piece", write_piece)
    say("q1", "q2")

    def next_answer(*arguments):
        # The first answer is held until its call ends, so reaching here again means it did.
        if chat_service.specs:
            assert chat_service.ended.wait(20)
            chat_service.events = lambda *_: answer_events("b")
        return stream_answer(*arguments)

    monkeypatch.setattr(chat_module, "stream_answer", next_answer)
    with Client(chat_service.address) as client:
        converse(client, {})
    assert asked(chat_service.specs[1]) == [("ROLE_USER", "q2")]
    assert "stopped" in capsys.readouterr().err


def test_the_end_of_the_input_and_an_empty_line_end_the_conversation(monkeypatch):
    runner = CliRunner()
    for typed in ("", "\n"):
        with runner.isolation(input=typed):
            assert chat_module._next_question() == ""


def test_control_characters_of_a_reply_do_not_reach_the_terminal():
    assert printable("a\x1b[2Jb\x9bc\r\n\td") == "a\ufffd[2Jb\ufffdc\ufffd\n\td"
    assert printable("과일 👨‍👩‍👧") == "과일 👨‍👩‍👧"


def test_one_line_is_one_line():
    assert one_line(" a\n\nb\tc ") == "a b c"
