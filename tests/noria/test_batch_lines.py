"""Every line of a batch is read or refused by its number before anything is asked."""

import json

import pytest

from noria.batch.lines import MAX_LINE_BYTES, LineError, read_lines


def read(tmp_path, *lines, priority=-100):
    path = tmp_path / "in.jsonl"
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(raw))
    return list(read_lines(path, priority))


def test_chats_and_raw_prompts_are_read_with_their_options(tmp_path):
    turn = {"role": "user", "content": "hi"}
    chat, blank, raw, ids = (
        {"messages": [turn], "id": "a", "system": "s", "priority": 3},
        b"   ",
        {"prompt": "once", "max_tokens": 5, "id": 7},
        {"prompt": [1, 2]},
    )
    first, second, third = read(tmp_path, chat, blank, raw, ids)
    assert (first.number, first.id, first.messages, first.prompt) == (1, "a", [turn], None)
    assert first.options == {"system": "s", "priority": 3}
    assert (second.number, second.id, second.prompt) == (3, "7", "once")
    assert second.options == {"max_tokens": 5, "priority": -100}
    assert (third.id, third.prompt) == ("4", [1, 2])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{", "line 1: not JSON"),
        (b"\xff", "line 1: not JSON"),
        (b"[" * 100_000, "line 1: not JSON"),
        ([1], "line 1: not a JSON object"),
        ({}, "line 1: messages: missing, and there is no prompt"),
        ({"messages": "hi"}, "line 1: messages: a list is needed"),
        ({"messages": [{"role": "king", "content": "x"}]}, "line 1: messages[0].role"),
        ({"messages": [], "prompt": "x"}, "line 1: prompt: not together"),
        ({"prompt": 5}, "line 1: prompt: a text or a list"),
        ({"prompt": ["x"]}, "line 1: prompt"),
        ({"prompt": [-1]}, "line 1: prompt"),
        ({"prompt": "x", "system": "y"}, "line 1: system"),
        ({"prompt": "x", "max_tokens": "many"}, "line 1: max_tokens"),
        ({"prompt": "x", "timeout": "5"}, "line 1: timeout: a number"),
        ({"prompt": "x", "timeout": -1}, "line 1: timeout"),
        ({"prompt": "x", "wish": 1}, "line 1: unknown option 'wish'"),
        ({"prompt": "x", "id": True}, "line 1: id"),
        (b'{"prompt": "x", "id": "\\ud800"}', "line 1: id: not valid Unicode"),
        (b'"' + b"x" * MAX_LINE_BYTES + b'"', f"line 1: more than {MAX_LINE_BYTES} bytes"),
    ],
)
def test_a_line_that_is_no_request_is_refused_by_number_and_field(tmp_path, line, told):
    with pytest.raises(LineError) as caught:
        read(tmp_path, line)
    assert str(caught.value).startswith(told)
