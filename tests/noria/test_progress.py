"""What a person sees while the services start."""

import io

import pytest
from rich.console import Console

from noria.cli.progress import EventPrinter, start_view

STARTING = [
    ("tokenizer", {"event": "progress", "stage": "loading the vocabulary", "done": 0, "total": 1}),
    ("tokenizer", {"event": "listening", "address": "127.0.0.1:1"}),
    ("tokenizer", {"event": "progress", "stage": "loading the vocabulary", "done": 1, "total": 1}),
    ("worker", {"event": "listening", "address": "127.0.0.1:2"}),
    ("worker", {"event": "progress", "stage": "loading weights", "done": 1, "total": 4}),
    ("worker", {"event": "progress", "stage": "loading weights", "done": 4, "total": 4}),
    ("worker", {"event": "something else"}),
    ("worker", {"event": "ready"}),
]


def shown(**console):
    out = io.StringIO()
    with start_view(Console(file=out, width=100, **console)) as view:
        for child, event in STARTING:
            view.on_event(child, event)
    return out.getvalue()


def test_elsewhere_than_on_a_terminal_each_stage_is_one_plain_line():
    assert shown().splitlines() == [
        "tokenizer: loading the vocabulary",
        "worker: starting",
        "worker: loading weights",
        "worker: ready",
    ]


def test_on_a_terminal_each_service_has_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = shown(force_terminal=True)
    assert "tokenizer" in text
    assert "ready" in text
    assert "1/1" in text


CACHE = {
    "event": "kv_cache", "num_blocks": 1280, "block_size": 16, "bytes_per_token": 23_040,
    "max_num_seqs": 32, "max_model_len": 8192,
}  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False])
def test_a_worker_says_what_its_kv_cache_holds(terminal):
    out = io.StringIO()
    with start_view(Console(file=out, width=200, force_terminal=terminal)) as view:
        view.on_event("worker", CACHE)
        view.on_event("worker", {**CACHE, "num_blocks": "?"})
    assert (
        out.getvalue().count(
            "worker: KV cache: 20,480 tokens = 1,280 blocks of 16, 471.9 MB = 450.0 MiB; up to 32 "
            "chats at once, 2.5 at the full length of 8,192"
        )
        == 1
    )


@pytest.mark.parametrize(
    "event", [{"event": "progress", "stage": "x", "done": "?", "total": None}, {}]
)
def test_odd_events_are_no_error(event):
    out = io.StringIO()
    for terminal in (True, False):
        with start_view(Console(file=out, force_terminal=terminal)) as view:
            view.on_event("worker", event)


def test_warnings_are_printed_and_the_rest_on_demand():
    events = [{"event": "a", "level": "info"}, {"event": "b", "level": "warning", "free": "[0]"}]
    for everything, expected in ((False, ["w: b"]), (True, ["w: a", "w: b"])):
        out = io.StringIO()
        printer = EventPrinter(Console(file=out), everything=everything)
        for event in events:
            printer.on_event("w", event)
        lines = out.getvalue().splitlines()
        assert [line.split(" level")[0] for line in lines] == expected
    assert "free=[0]" in lines[-1]
