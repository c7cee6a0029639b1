"""Whoever made a request's id is asked; what cannot be told is not called missing."""

import asyncio

import pytest
import structlog

from noria.reasons import Reason, RequestError
from router.kept_records import RecordKeeper, StoredRecord
from router.peers import Answer, Lookups, Question, Wish, new_request_id, router_of
from router.store.base import StoreUnavailableError
from router.store.memory_leases import MemoryLeases
from router.store.redis_connection import redis_connection
from router.store.redis_news import News
from router.store.redis_peers import RedisPeers
from router.store.redis_records import RedisRecords
from tests.support.waiting import until

MINE, THEIRS = "0" * 8, "f" * 8
ASKED = new_request_id(THEIRS)


class Peers:
    """Answers what it was told to, in turn; the last one again and again."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    async def ask(self, router_id, question):
        self.asked.append((router_id, question))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Records:
    def __init__(self, content=None):
        self.content = content

    async def get(self, tenant, request_id):
        return self.content


async def lookups(peers, *, alive=True, left=None, answer_s=2.0):
    leases = MemoryLeases()
    if alive:
        await leases.renew("routers", THEIRS, 60)
    return Lookups(MINE, peers, leases, Records(left), answer_s)


async def reason(coroutine):
    with pytest.raises(RequestError) as caught:
        await coroutine
    return caught.value.reason


def test_an_id_names_its_router_and_nothing_else_does():
    assert router_of(ASKED) == THEIRS
    for other in ("", "req-", ASKED[:-1], ASKED + "0", ASKED.upper(), "x" + ASKED, ASKED + "\n"):
        assert router_of(other) is None


async def test_the_router_of_the_id_is_asked_as_the_tenant():
    peers = Peers(Answer(True, b"record"))
    asking = await lookups(peers)
    assert await asking.record("search", ASKED) == b"record"
    await asking.cancel("search", ASKED)
    assert peers.asked == [
        (THEIRS, Question(Wish.RECORD, "search", ASKED)),
        (THEIRS, Question(Wish.CANCEL, "search", ASKED)),
    ]


async def test_what_it_has_not_and_what_no_router_could_have_are_alike():
    peers = Peers(Answer(False))
    asking = await lookups(peers)
    for request_id in (ASKED, new_request_id(MINE), "nonsense"):
        assert await reason(asking.record("t", request_id)) is Reason.REQUEST_NOT_FOUND
        assert await reason(asking.cancel("t", request_id)) is Reason.REQUEST_NOT_FOUND
    assert len(peers.asked) == 2


async def test_of_a_router_that_is_gone_what_it_left_is_told():
    gone = await lookups(Peers(None), alive=False, left=b"left")
    assert await gone.record("t", ASKED) == b"left"
    await gone.cancel("t", ASKED)
    nothing = await lookups(Peers(None), alive=False)
    assert await reason(nothing.record("t", ASKED)) is Reason.REQUEST_NOT_FOUND


async def test_one_that_lives_is_asked_again():
    peers = Peers(None, None, Answer(True, b"record"))
    assert await (await lookups(peers)).record("t", ASKED) == b"record"
    assert len(peers.asked) == 3


@pytest.mark.parametrize("silence", [None, StoreUnavailableError()])
async def test_whether_there_is_such_a_request_may_be_unknown(silence):
    """The router lives and is silent, or the store is away: neither found nor missing."""
    asking = await lookups(Peers(silence), answer_s=0.05)
    assert await reason(asking.record("t", ASKED)) is Reason.STORE_UNAVAILABLE
    assert await reason(asking.cancel("t", ASKED)) is Reason.STORE_UNAVAILABLE


@pytest.fixture
async def connection(redis_url):
    async with redis_connection(redis_url, structlog.get_logger(), timeout_s=5) as connected:
        yield connected


async def test_routers_hear_each_other_and_pass_nonsense_over(connection):
    """Each answers what it is asked; nobody answers for one that is not there."""
    running, ears = [], []
    for name, content in ((MINE, b"\x00mine"), (THEIRS, b"\xfftheirs")):
        news = News(connection)
        answer = Answer(True, content)
        ears.append(RedisPeers(connection, news, name, lambda question, a=answer: a))
        running += [asyncio.create_task(news.run()), asyncio.create_task(ears[-1].run())]
    question = Question(Wish.RECORD, "t", ASKED)
    channel = f"noria:router:{THEIRS}"
    for name in (MINE, THEIRS):
        for _ in range(1000):
            if await connection.client.publish(f"noria:router:{name}", ""):
                break
            await asyncio.sleep(0.005)
    for text in ("{", "[]", "1", "{}", '{"answer": "x"}', '{"question": 1, "wish": "steal"}'):
        await connection.client.publish(channel, text)
    asked = [ears[0].ask(THEIRS, question) for _ in range(20)]
    assert await asyncio.gather(*asked) == [Answer(True, b"\xfftheirs")] * 20
    assert await ears[0].ask("a" * 8, question) is None
    for task in running:
        task.cancel()


async def test_a_kept_record_is_its_tenants_alone_and_the_newest_one_counts(connection):
    records = RedisRecords(connection, ttl_s=60)
    keeper = RecordKeeper(records, max_waiting=2)
    for number, content in enumerate([b"first", b"second", b"third"]):
        keeper.keep(StoredRecord("search", f"req-{number}", content))
    keeper.keep(StoredRecord("search", "req-2", b"\x00newer"))
    await keeper.flush(5)
    assert await records.get("search", "req-0") is None
    assert await records.get("search", "req-1") == b"second"
    assert await records.get("search", "req-2") == b"\x00newer"
    for tenant in ("mail", "", "sear"):
        assert await records.get(tenant, "req-2") is None
    assert 0 < await connection.client.pttl("noria:record:req-2") <= 60_000


async def test_a_record_waits_for_a_store_that_is_away():
    class Away:
        left = None

        async def put(self, records):
            if self.left is None:
                self.left = []
                raise StoreUnavailableError
            self.left += records

    store = Away()
    keeper = RecordKeeper(store)
    keeper.keep(StoredRecord("t", "req", b"x"))
    running = asyncio.create_task(keeper.run())
    await until(lambda: store.left)
    running.cancel()
    assert [record.request_id for record in store.left] == ["req"]
