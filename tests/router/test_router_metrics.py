"""What the router counts: every ending once, in few series, in step with its records."""

import random
import string

import pytest
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from noria.reasons import Reason
from noria.v1 import chat_pb2
from router.metrics import _MAX_MODELS, Load, RouterMetrics, RouterState
from router.record import RequestRecord
from router.timeline import Phase
from tests.router.fakes import EOS, bearer, events, failure, routed, spec
from tests.support.scraping import Scrape


def figures_of(registry):
    return Scrape(generate_latest(registry).decode())


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
async def registry():
    return CollectorRegistry()


def ended(reason=None, *, method="StreamChat", model="m", output_tokens=0):
    """A record that queued for 2 s, decoded for 3 s, and had its first text after 4 s."""
    clock = Clock()
    record = RequestRecord("req", clock, method=method, model=model)
    record.queued(0)
    clock.now += 2
    record.timeline.enter(Phase.PREFILL)
    clock.now += 2
    record.first_delta()
    record.timeline.enter(Phase.DECODE)
    clock.now += 3
    record.input_tokens, record.output_tokens = 7, output_tokens
    record.cached_tokens = 5
    record.close(reason)
    return record


async def test_an_idle_router_has_every_outcome_at_zero(registry):
    RouterMetrics(registry, RouterState)
    figures = figures_of(registry)
    for outcome in ("SERVED", *Reason):
        assert figures["noria_requests_total", "StreamChat", outcome] == 0
    assert figures["noria_queue_requests",] == 0


async def test_latencies_are_the_records_own(registry):
    metrics = RouterMetrics(registry, RouterState)
    metrics.on_end(ended(output_tokens=4))
    figures = figures_of(registry)
    assert figures["noria_requests_total", "StreamChat", "SERVED"] == 1
    assert figures["noria_queue_time_seconds_sum", "m"] == 2
    assert figures["noria_time_to_first_token_seconds_sum", "m"] == 4
    assert figures["noria_inter_token_latency_seconds_sum", "m"] == 1
    assert figures["noria_end_to_end_latency_seconds_sum", "m"] == 7
    assert figures["noria_prompt_tokens_total", "m"] == 7
    assert figures["noria_cached_prompt_tokens_total", "m"] == 5
    assert figures["noria_output_tokens_total", "m"] == 4


async def test_a_request_that_was_not_served_has_no_end_to_end_latency(registry):
    metrics = RouterMetrics(registry, RouterState)
    metrics.on_end(ended(Reason.WORKER_LOST, output_tokens=4))
    figures = figures_of(registry)
    assert figures["noria_requests_total", "StreamChat", "WORKER_LOST"] == 1
    assert figures["noria_end_to_end_latency_seconds_count", "m"] == 0
    assert figures["noria_queue_time_seconds_count", "m"] == 1


async def test_a_count_of_tokens_is_no_generation(registry):
    metrics = RouterMetrics(registry, RouterState)
    metrics.on_end(ended(method="CountTokens"))
    figures = figures_of(registry)
    assert figures["noria_requests_total", "CountTokens", "SERVED"] == 1
    assert ("noria_prompt_tokens_total", "m") not in figures


async def test_demand_and_capacity_are_folded_where_models_are_too_many(registry):
    loads = {f"m{number}": Load(1, 10) for number in range(_MAX_MODELS + 5)}
    state = [RouterState(demand=loads, capacity=loads)]
    metrics = RouterMetrics(registry, lambda: state[0])
    figures = figures_of(registry)
    assert figures["noria_sequences_demand", "m3"] == 1
    assert figures["noria_sequences_demand", "other"] == 5
    assert figures["noria_kv_tokens_capacity", "other"] == 50
    metrics.on_end(ended(model="another", output_tokens=1))
    state[0] = RouterState()
    figures = figures_of(registry)
    assert figures["noria_output_tokens_total", "other"] == 1
    assert figures["noria_sequences_demand", "m3"] == 0


async def test_series_stay_few_whatever_callers_send():
    """MET-01: a thousand random keys, models and texts: not one more series, and none names
    them.
    """
    rng = random.Random(7)

    def noise():
        return "".join(rng.choices(string.ascii_letters, k=20))

    async with routed() as setup:
        setup.worker.auto = [10]
        await events(setup.stream())
        before = figures_of(setup.router.metrics_registry)
        sent = []
        for number in range(1000):
            sent.append(noise())
            request = chat_pb2.ChatRequest(spec=spec(noise(), model=sent[-1]))
            key = bearer(sent[-1]) if number % 2 else bearer()
            _, error = await failure(setup.stub.Chat(request, metadata=key))
            assert error.reason in (Reason.INVALID_KEY, Reason.MODEL_NOT_FOUND)
        after = figures_of(setup.router.metrics_registry)
        assert after.keys() == before.keys()
        assert len(after) < 1000
        assert after["noria_requests_total", "Chat", "INVALID_KEY"] == 500
        assert after["noria_requests_total", "Chat", "MODEL_NOT_FOUND"] == 500
        assert not {label for name in after for label in name} & set(sent)


async def test_the_ledger_and_demand_follow_a_request_and_end_at_zero():
    async with routed() as setup:
        registry = setup.router.metrics_registry
        call = setup.stream("hello")
        await setup.submitted(1)
        figures = figures_of(registry)
        assert figures["noria_held", "requests"] == 1
        assert figures["noria_held", "attempts"] == 1
        assert figures["noria_sequences_demand", "fake-model"] == 1
        assert figures["noria_sequences_capacity", "fake-model"] == 4
        assert figures["noria_kv_tokens_demand", "fake-model"] > 5
        assert figures["noria_kv_tokens_capacity", "fake-model"] == 16_000
        setup.worker.finish(1, "eos", EOS)
        await events(call)
        await setup.at_rest()
        figures = figures_of(registry)
        assert {value for name, value in figures.items() if name[0] == "noria_held"} == {0}
        assert figures["noria_sequences_demand", "fake-model"] == 0


async def test_workers_are_told_by_state():
    async with routed() as setup:
        registry = setup.router.metrics_registry
        figures = figures_of(registry)
        assert [figures["noria_workers", s] for s in ("known", "connected", "usable")] == [
            1,
            1,
            1,
        ]
        registry_of, tokenizer = setup.router.registry, setup.tokenizer.address
        registry_of.tell_vocabulary(tokenizer, "fake-model", "another")
        assert figures_of(registry)["noria_workers", "usable"] == 0
        registry_of.tell_vocabulary(tokenizer, "fake-model", "vocabulary")
