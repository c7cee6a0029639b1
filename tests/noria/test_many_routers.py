"""One name may stand for several routers."""

import contextlib

import pytest

from noria import AsyncClient, Client
from noria.client.connection import channel_options, checked_address
from tests.noria.fake_chat import FakeChat, serving


@pytest.fixture
def routers():
    """Two services, and a switch that stops the first."""
    with contextlib.ExitStack() as held, contextlib.ExitStack() as first:
        one, two = first.enter_context(serving(FakeChat())), held.enter_context(serving(FakeChat()))
        yield one, two, first.close


def target(*services):
    return "ipv4:" + ",".join(service.address for service in services)


def counts(*services):
    return [len(service.specs) for service in services]


def test_calls_are_shared_and_go_on_when_one_stops(routers):
    one, two, stop_first = routers
    with Client(target(one, two), timeout=20) as client:
        while min(counts(one, two)) == 0:  # until both connections stand
            client.chat("q")
        before = counts(one, two)
        for _ in range(10):
            client.chat("q")
        assert [now - then for now, then in zip(counts(one, two), before, strict=True)] == [5, 5]
        stop_first()
        seen = len(two.specs)
        for _ in range(10):
            assert client.chat("q").text == "Yes, it is."
        assert len(two.specs) == seen + 10


async def test_the_asynchronous_client_shares_too(routers):
    one, two, _ = routers
    async with AsyncClient(target(one, two), timeout=20) as client:
        while min(counts(one, two)) == 0:
            await client.chat("q")
        before = counts(one, two)
        for _ in range(4):
            async with client.stream_chat("q") as stream:
                assert [piece async for piece in stream]
        assert [now - then for now, then in zip(counts(one, two), before, strict=True)] == [2, 2]


@pytest.mark.parametrize(
    "address",
    ["h:1", "dns:///routers.example:50051", "ipv4:10.0.0.1:1,10.0.0.2:1", "unix:/tmp/router"],
)
def test_targets_of_each_form_are_taken(address):
    assert checked_address(address) == address


@pytest.mark.parametrize(
    ("address", "is_here"),
    [
        ("localhost:1", True),
        ("dns:///localhost:1", True),
        ("ipv4:127.0.0.1:1,127.0.0.2:1", True),
        ("ipv4:127.0.0.1:1,10.0.0.2:1", False),
        ("dns:///routers.example:1", False),
    ],
)
def test_no_proxy_is_asked_for_this_computer_itself(address, is_here):
    assert (("grpc.enable_http_proxy", 0) in channel_options(address)) == is_here
