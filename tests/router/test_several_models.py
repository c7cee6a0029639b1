"""Several models behind one router: each with its own tokenizers, workers and fate."""

import asyncio
import contextlib

import grpc
import structlog

from noria.reasons import Reason
from noria.v1 import chat_pb2
from tests.router.fakes import (
    FakeTokenizer,
    FakeWorker,
    bearer,
    events,
    failure,
    next_event,
    routed,
    spec,
    texts,
)
from tests.support.waiting import until

PATIENCE = {"tokenizer_patience_s": 0.2}


@contextlib.asynccontextmanager
async def two_models(**config):
    """`hare` and `tortoise`, whose ids mean different texts; workers of these names."""
    hare = FakeTokenizer("hares", "hare", "h")
    tortoise = FakeTokenizer("tortoises", "tortoise", "t")
    workers = [
        FakeWorker(model="hare", vocab_fingerprint="hares", aliases=["fast"]),
        FakeWorker(model="tortoise", vocab_fingerprint="tortoises", aliases=["slow"]),
    ]
    async with routed(*workers, tokenizer=hare, more_tokenizers=[tortoise], **config) as setup:
        router = setup.router
        await until(
            lambda: router._tokenizers.is_up("hare") and router._tokenizers.is_up("tortoise")
        )
        yield setup, hare, tortoise


async def test_interleaved_requests_keep_to_their_own_tokenizer_and_worker():
    async with two_models() as (setup, hare, tortoise):
        names = ["hare", "slow", "fast", "tortoise"] * 5
        for worker in setup.workers:
            worker.auto = [10, 11]
        answers = await asyncio.gather(*(events(setup.stream(model=name)) for name in names))
        for name, answer in zip(names, answers, strict=True):
            letter = "h" if name in ("hare", "fast") else "t"
            assert "".join(texts(answer)) == f"{letter}10{letter}11"
            assert answer[0].message_start.model == {"h": "hare", "t": "tortoise"}[letter]
        assert [len(worker.submits) for worker in setup.workers] == [10, 10]
        for tokenizer in (hare, tortoise):
            assert len(tokenizer.encoded) == len(tokenizer.opened) == 10
            assert {request.spec.model for request in tokenizer.encoded} == {tokenizer.model}


async def test_both_are_listed_and_a_name_is_needed():
    async with two_models() as (setup, _, _):
        listed = await setup.stub.ListModels(chat_pb2.ListModelsRequest(), metadata=bearer())
        assert [(m.name, list(m.aliases)) for m in listed.models] == [
            ("hare", ["fast"]),
            ("tortoise", ["slow"]),
        ]
        code, error = await failure(setup.stream())
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.message == "model: no name; 2 are served: hare, tortoise"
        for model in ("hare", "tortoise"):
            count = chat_pb2.CountTokensRequest(spec=spec("four", model=model))
            assert (await setup.stub.CountTokens(count, metadata=bearer())).input_tokens == 4


async def test_a_models_own_name_is_never_anothers_alias():
    """Whichever worker came first; an alias that two models claim is the later one's."""
    hare, tortoise = FakeTokenizer(model="hare"), FakeTokenizer(model="tortoise")
    for order in (("hare", "tortoise"), ("tortoise", "hare")):
        workers = [FakeWorker(model=name, aliases=["hare", "tortoise"]) for name in order]
        async with routed(*workers, tokenizer=hare, more_tokenizers=[tortoise]) as setup:
            for worker in workers:
                worker.auto = [10]
            for name in order:
                answer = await events(setup.stream(model=name))
                assert answer[0].message_start.model == name


async def test_a_lost_tokenizer_is_lost_to_its_own_model_alone():
    async with two_models(**PATIENCE) as (setup, _, tortoise):
        calls = [setup.stream(model=name) for name in ("hare", "tortoise")]
        for index, worker in enumerate(setup.workers):
            await setup.submitted(1, index)
            worker.emit(1, 10)
        for call in calls:
            while (await next_event(call)).WhichOneof("event") != "content_block_delta":
                pass
        await tortoise.stop()
        assert (await failure(calls[1]))[1].reason is Reason.TOKENIZER_LOST
        code, error = await failure(setup.stream(model="tortoise"))
        assert (code, error.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.NO_TOKENIZER)
        assert error.message == "no tokenizer of tortoise is connected"
        setup.workers[0].emit(1, 11)
        setup.workers[0].finish(1, "eos", 2)
        assert "h11" in texts(await events(calls[0]))
        await tortoise.start()
        setup.workers[1].auto = [12]
        await until(lambda: setup.router._tokenizers.is_up("tortoise"))
        assert texts(await events(setup.stream(model="tortoise"))) == ["t12"]


async def test_another_vocabulary_ends_the_requests_of_its_own_model_alone():
    async with two_models() as (setup, _, tortoise):
        calls = [setup.stream(model=name) for name in ("hare", "tortoise")]
        for index in range(2):
            await setup.submitted(1, index)
        await tortoise.stop()
        tortoise.fingerprint = "turtles"
        await tortoise.start()
        assert (await failure(calls[1]))[1].reason is Reason.TOKENIZER_LOST
        assert (await failure(setup.stream(model="tortoise")))[1].reason is (
            Reason.VOCABULARY_MISMATCH
        )
        setup.workers[0].finish(1, "eos", 2)
        assert (await events(calls[0]))[-1].HasField("message_stop")


async def test_a_model_without_a_tokenizer_of_its_name_is_refused_and_the_others_served():
    """The same vocabulary is not enough: another model's template would be used."""
    hare, other = FakeTokenizer(model="hare"), FakeTokenizer(model="other")
    workers = FakeWorker(model="hare"), FakeWorker(model="tortoise")
    async with routed(*workers, tokenizer=hare, more_tokenizers=[other]) as setup:
        workers[0].auto = [10]
        code, error = await failure(setup.stream(model="tortoise"))
        assert (code, error.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.NO_TOKENIZER)
        assert (await events(setup.stream(model="hare")))[-1].HasField("message_stop")


async def test_of_a_models_tokenizers_the_one_with_the_fewest_slots_is_taken():
    """And the one that is there, when the other is not."""
    both = FakeTokenizer(model="fake-model"), FakeTokenizer(model="fake-model")
    async with routed(tokenizer=both[0], more_tokenizers=both[1:], **PATIENCE) as setup:
        await until(lambda: all(each.is_up for each in setup.router._tokenizers))
        calls = []
        for count in range(1, 5):
            calls.append(setup.stream())
            await setup.submitted(count)
            setup.worker.emit(count, 10)
            await next_event(calls[-1])
            await until(lambda n=count: sum(len(each.opened) for each in both) == n)
        assert [len(each.opened) for each in both] == [2, 2]
        for number in range(1, 5):
            setup.worker.finish(number, "eos", 2)
        for call in calls:
            await events(call)
        await both[0].stop()
        await until(lambda: sum(each.is_up for each in setup.router._tokenizers) == 1)
        setup.worker.auto = [10]
        assert texts(await events(setup.stream())) == [" 10"]


async def test_a_second_tokenizer_with_another_vocabulary_of_the_model_is_not_used():
    """Whichever came first counts; the log has both fingerprints."""
    both = FakeTokenizer(model="fake-model"), FakeTokenizer("odd", model="fake-model")
    with structlog.testing.capture_logs() as lines:
        async with routed(tokenizer=both[0], more_tokenizers=both[1:], ready=False) as setup:
            tokenizers = setup.router._tokenizers
            await until(lambda: all(each.is_up for each in tokenizers))
            counts = setup.router.registry.vocabulary("fake-model")
            used = next(each for each in both if each.fingerprint == counts)
            assert [t.address for t in tokenizers._having("fake-model")] == [used.address]
    told = [line for line in lines if line["event"] == "vocabulary_mismatch"]
    assert {"vocabulary", "odd"} <= {value for line in told for value in line.values()}
