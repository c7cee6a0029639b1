"""A tokenizer that comes back with another vocabulary ends whatever was encoded with the old."""

import grpc

from noria.reasons import Reason
from tests.router.fakes import FakeTokenizer, FakeWorker, events, failure, routed
from tests.support.waiting import until


async def swap(setup, fingerprint="other"):
    await setup.tokenizer.stop()
    setup.tokenizer.fingerprint = fingerprint
    await setup.tokenizer.start()
    await until(lambda: setup.router.registry.vocabulary("fake-model") == fingerprint)


async def assert_ended(call):
    code, error = await failure(call)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert error.reason is Reason.TOKENIZER_LOST


async def test_a_request_at_a_worker_that_has_no_token_yet():
    async with routed() as setup:
        call = setup.stream("a")
        await setup.submitted(1)
        await swap(setup)
        await assert_ended(call)
        await until(lambda: setup.worker.aborts)


async def test_a_queued_request_is_never_given_to_a_worker_of_the_new_vocabulary():
    worker, tokenizer = FakeWorker(max_num_seqs=1), FakeTokenizer()
    patience = {"worker_patience_s": 30, "tokenizer_patience_s": 30}
    async with routed(worker, tokenizer=tokenizer, **patience) as setup:
        first = setup.stream("a")
        await setup.submitted(1)
        worker.say_load(running=1, waiting=5, free_blocks=0)
        await until(lambda: not any(w.load.free_blocks for w in setup.router.registry))
        queued = setup.stream("b")
        await until(lambda: setup.router.held()["permits"] == 1)
        before = len(worker.submits)
        await tokenizer.stop()
        await worker.stop()
        tokenizer.fingerprint = "other"
        worker.hello["vocab_fingerprint"] = "other"
        worker.auto = [9]
        await tokenizer.start()
        await until(lambda: setup.router.registry.vocabulary("fake-model") == "other")
        await worker.start()
        for call in (first, queued):
            await assert_ended(call)
        assert len(worker.submits) == before
        # Whoever asks afterwards is served by the new pair.
        await until(lambda: any(w.load is not None for w in setup.router.registry))
        assert (await events(setup.stream("c")))[-1].HasField("message_stop")


async def test_the_same_vocabulary_again_ends_nothing():
    async with routed() as setup:
        call = setup.stream("a")
        submit = await setup.submitted(1)
        await setup.tokenizer.stop()
        await setup.tokenizer.start()
        await until(lambda: setup.router._tokenizers.is_up("fake-model"))
        setup.worker.emit(submit.submit_number, 10)
        setup.worker.finish(submit.submit_number, "eos", 2)
        assert (await events(call))[-1].HasField("message_stop")
        assert setup.router.registry.vocabulary("fake-model") == "vocabulary"
