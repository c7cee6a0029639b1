"""What router and tokenizer add is what lies between the worker's clock and the client's."""

import json

import pytest
from click.testing import CliRunner

from bench.overhead.command import router
from bench.overhead.fleet import Fleet, Live, Lives
from bench.overhead.streams import Answer, added
from noria.v1 import worker_pb2


def test_each_token_is_timed_from_its_leaving_to_its_messages_arrival():
    """The second message carries two; the first token's time leaves out what the worker took."""
    answer = Answer("r", sent_at=10.0, messages=[(13.0, 1), (17.0, 3)])
    told = added([answer], {"r": [11.0, 12.5, 14.0, 16.0]})
    assert told.first_s == [3.0 - 1.5]
    assert told.token_s == [0.5, 3.0, 1.0]
    assert (told.num_messages, told.num_tokens, told.wall_s) == (2, 3, 7.0)


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_stream_that_brought_another_number_of_tokens_is_no_measurement(tokens):
    answer = Answer("r", sent_at=0.0, messages=[(1.0, tokens)])
    with pytest.raises(ValueError, match=f"2 tokens left, {tokens} arrived"):
        added([answer], {"r": [0.0, 0.5, 0.75]})


def test_a_step_gives_everyone_an_id_and_ends_whoever_has_all():
    fleet = Fleet(worker_pb2.WorkerHello(), 7, 0.01)
    lives = Lives({1: Live(1, 1, [0.0]), 2: Live(2, 3, [0.0])}, last=2)
    step = fleet._step(lives)
    assert [(d.submit_number, list(d.token_ids)) for d in step.deltas] == [(1, [7]), (2, [7])]
    assert [(t.submit_number, list(t.finished.output_tokens)) for t in step.terminals] == [(1, [1])]
    assert list(lives.entries) == [2]
    assert (step.load.running, step.load.last_submit_number) == (1, 2)


@pytest.mark.model
@pytest.mark.soak
def test_all_streams_arrive_whole_through_router_and_tokenizer(demo_model_path, tmp_path):
    figures = tmp_path / "figures.json"
    argv = ["--streams", "2", "--streams", "8", "--output-tokens", "20", "--json", str(figures)]
    result = CliRunner().invoke(router, argv, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    levels = json.loads(figures.read_text())["levels"]
    assert [(level["streams"], level["interval_ms"]) for level in levels] == [
        (2, 16),
        (8, 16),
        (8, 2),
    ]
    assert all(level["tokens_per_message"] >= 1 for level in levels)
    assert all(0 < level["token_p50_ms"] <= level["token_p99_ms"] for level in levels)
