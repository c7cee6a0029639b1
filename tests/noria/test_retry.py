"""What was refused with a delay is asked again after it, within the deadline, and nothing else."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import noria
from noria import AsyncClient, Client
from noria.client.errors import ERROR_OF
from noria.client.retry import MIN_PAUSE_S, SPREAD, Attempts, pause, repeated
from noria.reasons import RETRY_OF, Reason, RequestError, Retry
from tests.noria.fake_chat import REQUEST_ID, answer_events, refuse, text_event

SOON = RequestError(Reason.QUEUE_FULL, "full", retry_after_s=0.01)
LATE = RequestError(Reason.QUEUE_FULL, "full", retry_after_s=1000)


class FakeTime:
    """A clock, and an event whose waiting moves it instead of taking time."""

    def __init__(self):
        self.now = 100.0
        self.pauses = []

    def clock(self):
        return self.now

    def wait(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds
        return False


def attempts(time, timeout=60.0, *, retry=True, spread=0.0):
    return Attempts(time, timeout, retry=retry, clock=time.clock, spread=lambda: spread)


def refusal(seconds, reason=Reason.QUEUE_FULL):
    return ERROR_OF[reason]("why", retry_after_s=seconds)


class Refused(grpc.RpcError):
    """What grpc raises for QUEUE_FULL with RetryInfo."""

    def __init__(self, seconds):
        from noria.service.errors import DETAILS_KEY, status_details

        error = RequestError(Reason.QUEUE_FULL, "full", retry_after_s=seconds)
        self._trailing = ((DETAILS_KEY, status_details(error, REQUEST_ID)),)

    def code(self):
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self):
        return "full"

    def trailing_metadata(self):
        return self._trailing


def test_the_next_attempt_comes_after_the_stated_delay():
    assert attempts(FakeTime()).pause_after(refusal(2.5)) == 2.5


def test_attempts_are_spread_upwards_alone():
    assert attempts(FakeTime(), spread=1.0).pause_after(refusal(10)) == pytest.approx(
        10 * (1 + SPREAD)
    )


@pytest.mark.parametrize("seconds", [0.0, -5.0])
def test_a_server_that_names_no_time_is_not_asked_in_a_tight_loop(seconds):
    assert attempts(FakeTime()).pause_after(refusal(seconds)) == MIN_PAUSE_S


def test_a_delay_that_ends_after_the_deadline_is_not_waited_for():
    time = FakeTime()
    one = attempts(time, 10.0)
    assert one.pause_after(refusal(9.9)) == 9.9
    assert one.pause_after(refusal(10.0)) is None
    time.now += 5
    assert one.pause_after(refusal(5.0)) is None


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_that_no_waiting_helps_is_never_tried_again(reason):
    seconds = attempts(FakeTime()).pause_after(refusal(1.0, reason))
    assert seconds == (None if RETRY_OF[reason] is Retry.NO else 1.0)


def test_without_a_delay_or_with_retry_off_there_is_one_attempt():
    assert attempts(FakeTime()).pause_after(refusal(None)) is None
    assert attempts(FakeTime(), retry=False).pause_after(refusal(1.0)) is None


def test_the_refusal_itself_is_raised_when_there_is_no_further_attempt():
    error = refusal(1000)
    with pytest.raises(noria.QueueFullError) as caught:
        pause(attempts(FakeTime()), error)
    assert caught.value is error


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 1000))
def test_all_attempts_together_stay_within_the_deadline(delays, timeout):
    time, timeouts, left = FakeTime(), [], iter(delays)

    def call(seconds):
        timeouts.append(seconds)
        for delay in left:
            raise Refused(delay)
        return "answer"

    def is_answered():
        try:
            return repeated(attempts(time, timeout), call) == "answer"
        except noria.QueueFullError:
            return False

    assert is_answered() == (sum(delays) < timeout)
    assert all(seconds > 0 for seconds in timeouts)
    assert timeouts == sorted(timeouts, reverse=True)
    assert time.now <= 100 + timeout


def refusing(chat_service, error, times=10_000):
    """Let the service refuse so many calls before it answers."""
    left = iter(range(times))

    def events(_spec, context):
        if next(left, None) is not None:
            refuse(context, error)
        return answer_events("Yes", "!")

    chat_service.events = events


def chat(address, **options):
    with Client(address, api_key="k", timeout=20, **options) as client:
        return client.chat("q").text


def stream(address, **options):
    with (
        Client(address, api_key="k", timeout=20, **options) as client,
        client.stream_chat("q") as answer,
    ):
        return "".join(answer)


def chat_async(address, **options):
    async def run():
        async with AsyncClient(address, api_key="k", timeout=20, **options) as client:
            return (await client.chat("q")).text

    return asyncio.run(run())


def stream_async(address, **options):
    async def run():
        async with (
            AsyncClient(address, api_key="k", timeout=20, **options) as client,
            client.stream_chat("q") as answer,
        ):
            return "".join([piece async for piece in answer])

    return asyncio.run(run())


EACH_WAY = pytest.mark.parametrize("ask", [chat, stream, chat_async, stream_async])


@EACH_WAY
def test_a_call_refused_for_a_while_is_answered(chat_service, ask):
    refusing(chat_service, SOON, times=2)
    assert ask(chat_service.address) == "Yes!"
    assert len(chat_service.specs) == 3
    assert chat_service.specs[0] == chat_service.specs[2]


def record_timeouts(stream):
    """The timeouts that a stream's attempts start with, from now on."""
    start, timeouts = stream._start, []

    def recording(timeout):
        timeouts.append(timeout)
        return start(timeout)

    stream._start = recording
    return timeouts


async def test_a_stream_s_attempts_share_its_deadline(chat_service):
    refusing(chat_service, SOON, times=2)
    with Client(chat_service.address) as client:
        answer = client.stream_chat("q", timeout=20)
        timeouts = record_timeouts(answer)
        with answer:
            list(answer)
    async with AsyncClient(chat_service.address) as client:
        refusing(chat_service, SOON, times=2)
        answer = client.stream_chat("q", timeout=20)
        timeouts_async = record_timeouts(answer)
        async with answer:
            _ = [piece async for piece in answer]
    for first, second, third in (timeouts, timeouts_async):
        assert 20 >= first >= second + MIN_PAUSE_S * 0.9 >= third + 2 * MIN_PAUSE_S * 0.9


@EACH_WAY
@pytest.mark.parametrize(
    ("error", "options"),
    [
        (LATE, {}),
        (SOON, {"retry": False}),
        (RequestError(Reason.QUEUE_FULL, "full"), {}),
        (RequestError(Reason.NO_WORKER, "none"), {}),
        (RequestError(Reason.INVALID_FIELD, "bad", retry_after_s=0.01), {}),
    ],
)
def test_what_is_not_to_be_tried_again_is_asked_once(chat_service, ask, error, options):
    refusing(chat_service, error)
    with pytest.raises(ERROR_OF[error.reason]) as caught:
        ask(chat_service.address, **options)
    assert caught.value.retry_after_s == error.retry_after_s
    assert len(chat_service.specs) == 1


@pytest.mark.parametrize("ask", [stream, stream_async])
def test_nothing_is_tried_again_after_the_first_event(chat_service, ask):
    def events(_spec, context):
        yield text_event("Y")
        refuse(context, SOON)

    chat_service.events = events
    with pytest.raises(noria.QueueFullError):
        ask(chat_service.address)
    assert len(chat_service.specs) == 1


@pytest.fixture
def pausing(chat_service):
    """A service whose refusal names a delay far longer than the test."""
    refusing(chat_service, RequestError(Reason.QUEUE_FULL, "full", retry_after_s=300))
    return chat_service


def is_asked_once(service):
    return len(service.specs) == 1


def test_cancel_ends_a_pause(pausing):
    with (
        ThreadPoolExecutor(1) as pool,
        Client(pausing.address) as client,
        client.stream_chat("q") as answer,
    ):
        reading = pool.submit(list, answer)
        pausing.ended.wait(20)
        answer.cancel()
        with pytest.raises(noria.RequestCancelledError):
            reading.result(20)
    assert is_asked_once(pausing)


@pytest.mark.parametrize("way", ["chat", "stream"])
def test_closing_the_client_ends_a_pause(pausing, way):
    with ThreadPoolExecutor(1) as pool:
        client = Client(pausing.address)
        answer = client.stream_chat("q")
        if way == "stream":
            reading = pool.submit(list, answer.__enter__())
        else:
            reading = pool.submit(client.chat, "q")
        pausing.ended.wait(20)
        client.close()
        with pytest.raises(noria.RequestCancelledError):
            reading.result(20)
    assert is_asked_once(pausing)


@pytest.mark.parametrize("way", ["cancel", "close", "task"])
async def test_a_pause_on_an_event_loop_ends_like_a_call(pausing, way):
    client = AsyncClient(pausing.address)
    answer = await client.stream_chat("q").__aenter__()

    async def read():
        return [piece async for piece in answer]

    reading = asyncio.create_task(read())
    await asyncio.to_thread(pausing.ended.wait, 20)
    if way == "cancel":
        answer.cancel()
    elif way == "close":
        await client.close()
    else:
        reading.cancel()
    expected = asyncio.CancelledError if way == "task" else noria.RequestCancelledError
    with pytest.raises(expected):
        await asyncio.wait_for(reading, 20)
    await answer.__aexit__(None, None, None)
    await client.close()
    assert is_asked_once(pausing)


def test_an_attempt_begun_just_as_cancel_came_is_cancelled_too(chat_service):
    """The first attempt is refused; `cancel` comes between it and the second."""
    refusing(chat_service, SOON, times=1)
    with Client(chat_service.address) as client, client.stream_chat("q") as answer:
        start, started = answer._start, threading.Event()

        def start_late(timeout):
            answer.cancel()
            started.set()
            return start(timeout)

        answer._start = start_late
        with pytest.raises(noria.RequestCancelledError):
            list(answer)
    assert started.is_set()
