"""Workers and tokenizers that refuse, break and come back."""

import asyncio

import grpc
import pytest

from noria.reasons import Reason, RequestError
from noria.v1 import worker_pb2
from tests.router.fakes import (
    EOS,
    FakeTokenizer,
    FakeWorker,
    events,
    failure,
    kinds,
    next_event,
    routed,
    texts,
    until,
)


async def read_text(call, length: int) -> str:
    """Read until this much text has come."""
    text = ""
    while len(text) < length:
        text += (await next_event(call)).content_block_delta.text
    return text


async def test_a_refused_request_waits_for_room_and_is_placed_again():
    """FULL costs the request nothing, not even its place before those who came later."""
    async with routed() as setup:
        first, second = setup.stream("first"), None
        await setup.submitted(1)
        second = setup.stream("second")
        await setup.submitted(2)
        setup.worker.refuse(1, worker_pb2.REFUSAL_CODE_FULL)
        await until(lambda: setup.router.held()["permits"] == 1)
        setup.worker.say_load()
        again = await setup.submitted(3)
        assert again.id.endswith("/2")
        setup.worker.finish(3, "eos", EOS)
        setup.worker.finish(2, "eos", EOS)
        answer = await events(first)
        assert kinds(answer).count("message_start") == 1
        await events(second)


async def test_a_refusal_is_not_answered_by_submitting_again_at_once():
    """Until the worker reports again nothing is sent to it, however often it says full."""
    async with routed() as setup:
        call = setup.stream()
        for refusals in range(1, 6):
            await setup.submitted(refusals)
            setup.worker.refuse(refusals, worker_pb2.REFUSAL_CODE_FULL)
            await until(lambda: setup.router.held()["permits"] == 1)
            assert len(setup.worker.submits) == refusals
            setup.worker.say_load()
        await setup.submitted(6)
        setup.worker.finish(6, "eos", EOS)
        await events(call)


async def test_a_draining_worker_gets_nothing_new_and_the_other_takes_over():
    async with routed(FakeWorker(), FakeWorker()) as setup:
        call = setup.stream()
        draining, other = await setup.holder()
        draining.draining = True
        draining.refuse(1, worker_pb2.REFUSAL_CODE_DRAINING)
        await until(lambda: other.submits)
        other.finish(1, "eos", EOS)
        await events(call)
        other.auto = []
        for _ in range(4):
            await events(setup.stream())
        assert len(draining.submits) == 1


async def test_an_invalid_submit_is_the_callers_mistake_named_by_field():
    async with routed() as setup:
        call = setup.stream()
        await setup.submitted(1)
        setup.worker.refuse(
            1, worker_pb2.REFUSAL_CODE_INVALID, "70000; below 49152", "sampling.stop_token_ids"
        )
        code, error = await failure(call)
        assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD)
        assert error.fields == (("sampling.stop_token_ids", "70000; below 49152"),)


async def test_a_failing_worker_is_internal_and_tells_nothing():
    async with routed() as setup:
        call = setup.stream()
        await setup.submitted(1)
        setup.worker.refuse(1, worker_pb2.REFUSAL_CODE_INTERNAL, "Traceback: secret")
        code, error = await failure(call)
        assert (code, error.reason) == (grpc.StatusCode.INTERNAL, Reason.INTERNAL)
        assert "secret" not in error.message


async def test_an_attempt_that_expires_at_the_worker_is_a_passed_deadline():
    async with routed() as setup:
        call = setup.stream()
        await setup.submitted(1)
        setup.worker.finish(1, "expired")
        assert (await failure(call))[1].reason is Reason.DEADLINE_EXCEEDED


async def test_a_worker_lost_before_the_first_token_is_a_pause():
    """RTR-04, RTR-05: the request is placed at the other worker; the client sees one
    message_start.
    """
    async with routed(FakeWorker(), FakeWorker()) as setup:
        call = setup.stream()
        lost, other = await setup.holder()
        lost.break_session()
        await until(lambda: other.submits)
        assert other.submits[0].id.endswith("/2")
        other.emit(1, 10)
        other.finish(1, "eos", EOS)
        answer = await events(call)
        assert kinds(answer).count("message_start") == 1
        assert texts(answer) == [" 10"]


async def test_a_worker_lost_after_the_first_token_ends_the_stream():
    """RTR-04, STR-04: UNAVAILABLE / WORKER_LOST with the tokens so far, no message_stop, no second
    try.
    """
    async with routed(FakeWorker(), FakeWorker()) as setup:
        call = setup.stream()
        lost, other = await setup.holder()
        lost.emit(1, 10)
        await read_text(call, 3)
        lost.break_session()
        code, error = await failure(call)
        assert (code, error.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.WORKER_LOST)
        assert "1 output token" in error.message
        assert not other.submits


async def test_a_request_is_placed_again_at_most_three_times():
    async with routed() as setup:
        call = setup.stream()
        for attempt in range(1, 5):
            assert (await setup.submitted(attempt)).id.endswith(f"/{attempt}")
            setup.worker.break_session()
        assert (await failure(call))[1].reason is Reason.WORKER_LOST
        assert len(setup.worker.submits) == 4


async def test_a_restarted_worker_is_used_again():
    async with routed() as setup:
        await setup.worker.stop()
        await until(lambda: not list(setup.router.registry))
        assert (await failure(setup.stream()))[1].reason is Reason.NO_WORKER
        await setup.worker.start()
        await setup.router.wait_ready()
        setup.worker.auto = [10]
        assert await events(setup.stream())


async def test_those_who_wait_for_a_model_nobody_serves_any_more_give_up():
    """RTR-08: the only worker goes and stays away: NO_WORKER after the patience, not the
    deadline.
    """
    async with routed(worker_patience_s=0.05) as setup:
        call = setup.stream()
        await setup.submitted(1)
        await setup.worker.stop()
        assert (await failure(call))[1].reason is Reason.NO_WORKER


@pytest.mark.parametrize("at", [1, 2, 5])
async def test_a_broken_decode_session_leaves_no_gap_and_repeats_nothing(at):
    """Wherever it breaks, also with ids on their way, the joined text is the undisturbed one."""
    async with routed() as setup:
        setup.tokenizer.pieces = dict(enumerate(["과", "ab", "🍅", "", "c"]))
        call = setup.stream()
        await setup.submitted(1)
        for token_id in range(at):
            setup.worker.emit(1, token_id)
        await until(lambda: sum(len(s.ids) for s in setup.tokenizer.slots.values()) == at)
        setup.tokenizer.break_sessions()
        for token_id in range(at, 5):
            setup.worker.emit(1, token_id)
        await until(lambda: len(setup.tokenizer.opened) == 2)
        setup.worker.finish(1, "eos", EOS)
        assert "".join(texts(await events(call))) == "과ab🍅c"


async def test_a_break_after_the_last_token_still_brings_the_end():
    """The worker is done, the flush is on its way: the reopened slot is flushed again."""
    async with routed() as setup:
        setup.tokenizer.pieces = {10: "STO"}
        call = setup.stream(stop_sequences=["STOP"])
        await setup.submitted(1)
        setup.worker.emit(1, 10)
        await until(lambda: setup.tokenizer.slots)
        setup.tokenizer.decode_gate.clear()
        setup.worker.finish(1, "eos", EOS)
        await until(lambda: setup.router.held()["attempts"] == 0)
        setup.tokenizer.break_sessions()
        setup.tokenizer.decode_gate.set()
        assert "".join(texts(await events(call))) == "STO"


async def test_a_tokenizer_that_stays_away_ends_running_streams():
    async with routed(tokenizer_patience_s=0.1) as setup:
        call = setup.stream()
        await setup.submitted(1)
        setup.worker.emit(1, 10)
        await read_text(call, 3)
        await setup.tokenizer.stop()
        assert (await failure(call))[1].reason is Reason.TOKENIZER_LOST
        assert (await failure(setup.stream()))[1].reason is Reason.NO_TOKENIZER


async def test_a_new_request_waits_for_a_tokenizer_that_restarts():
    async with routed() as setup:
        setup.worker.auto = [10]
        await setup.tokenizer.stop()
        call = setup.stream()
        await until(lambda: setup.router.held()["requests"] == 1)
        await setup.tokenizer.start()
        assert texts(await events(call)) == [" 10"]


async def test_what_the_tokenizer_refuses_is_passed_on():
    async with routed() as setup:
        setup.tokenizer.encode_error = RequestError(
            Reason.UNSUPPORTED, "messages: no", fields=(("messages", "no"),)
        )
        code, error = await failure(setup.stream())
        assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.UNSUPPORTED)
        assert error.fields == (("messages", "no"),)


async def test_a_worker_with_another_vocabulary_is_not_used():
    """Alone it means VOCABULARY_MISMATCH; beside a matching one it is passed over."""
    async with routed(FakeWorker(vocab_fingerprint="other"), ready=False) as setup:
        await until(lambda: list(setup.router.registry) and setup.tokenizer.slots is not None)
        await until(lambda: setup.router.registry.vocabulary("fake-model") is not None)
        code, error = await failure(setup.stream())
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert error.reason is Reason.VOCABULARY_MISMATCH
        assert not setup.tokenizer.encoded
    async with routed(FakeWorker(vocab_fingerprint="other"), FakeWorker()) as setup:
        setup.workers[1].auto = [10]
        assert await events(setup.stream())
        assert not setup.worker.submits


async def test_a_worker_of_a_distant_protocol_version_is_not_used():
    async with routed(FakeWorker(protocol_version=3), FakeWorker(), ready=False) as setup:
        await setup.router.wait_ready()
        await until(lambda: setup.worker.instances >= 1)
        assert [w.worker_id for w in setup.router.registry] == [setup.workers[1].address]


async def test_two_workers_share_the_load():
    """Each next request goes where fewer tokens are in flight."""
    async with routed(FakeWorker(), FakeWorker()) as setup:
        calls = []
        for count in range(1, 9):
            calls.append(setup.stream(max_tokens=100))
            await until(lambda n=count: sum(len(w.submits) for w in setup.workers) == n)
        assert [len(w.submits) for w in setup.workers] == [4, 4]
        for worker in setup.workers:
            for number in list(worker.live):
                worker.finish(number, "eos", EOS)
        await asyncio.gather(*map(events, calls))


async def test_models_are_told_apart_by_name_and_alias():
    """Empty needs a single model; an unknown name is NOT_FOUND and lists what there is."""
    first = FakeWorker(model="first", aliases=["default"])
    async with routed(first, FakeWorker(model="second")) as setup:
        for worker in setup.workers:
            worker.auto = [10]
        answer = await events(setup.stream(model="default"))
        assert answer[0].message_start.model == "first"
        await events(setup.stream(model="second"))
        assert [len(w.submits) for w in setup.workers] == [1, 1]
        code, error = await failure(setup.stream(model="third"))
        assert (code, error.reason) == (grpc.StatusCode.NOT_FOUND, Reason.MODEL_NOT_FOUND)
        assert "first, second" in error.message
        assert (await failure(setup.stream()))[1].fields[0][0] == "model"


async def test_a_full_model_does_not_hold_up_another():
    async with routed(FakeWorker(model="full"), FakeWorker(model="free")) as setup:
        setup.worker.say_load(running=4, waiting=1, free_blocks=0)
        await until(lambda: any(w.load.waiting for w in setup.router.registry))
        waiting = setup.stream(model="full")
        await until(lambda: setup.router.held()["queued_tokens"])
        setup.workers[1].auto = [10]
        assert await events(setup.stream(model="free"))
        setup.worker.auto = [10]
        setup.worker.say_load()
        assert await events(waiting)


async def test_a_text_that_cannot_be_decoded_is_internal():
    class Bad(FakeTokenizer):
        def _texts(self, request):
            for text in super()._texts(request):
                text.error = "id 70000 is outside the vocabulary"
                yield text

    async with routed(tokenizer=Bad()) as setup:
        call = setup.stream()
        await setup.submitted(1)
        setup.worker.emit(1, 70000)
        code, error = await failure(call)
        assert code is grpc.StatusCode.INTERNAL
        assert "70000" not in error.message
