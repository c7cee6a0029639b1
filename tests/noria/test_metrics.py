"""The metrics' ground: an own port, figures read on the loop, a loop that stands still."""

import asyncio
import socket
import threading

import pytest
from prometheus_client import generate_latest

from noria.service import metrics
from noria.service.metrics import LiveCollector, LoopLag, gauge, new_registry, serving_metrics
from tests.support.scraping import Scrape, scrape


async def test_metrics_are_served_on_a_port_of_their_own_until_the_block_ends():
    async with serving_metrics("127.0.0.1:0", new_registry()) as address:
        figures = await scrape(address)
        assert figures["process_open_fds",] > 0
        assert figures["noria_event_loop_lag_seconds_count",] >= 0
        assert not [name for name in figures if name[0].endswith("_created")]
    with pytest.raises(OSError, match="refused"):
        await scrape(address)


async def test_without_an_address_nothing_listens():
    async with serving_metrics("", new_registry()) as address:
        assert address == ""


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", "a b:1"])
async def test_an_address_that_is_none_is_named(listen):
    with pytest.raises(OSError, match=f"cannot serve metrics on {listen}"):
        async with serving_metrics(listen, new_registry()):
            pass


async def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot serve metrics on {listen}: .*in use"):
            async with serving_metrics(listen, new_registry()):
                pass


async def test_gauges_are_read_on_the_loop_at_each_scrape():
    held, threads = [], set()

    def read():
        threads.add(threading.current_thread())
        return [gauge("noria_test", "Things.", len(held))]

    registry = new_registry()
    registry.register(LiveCollector(read))
    async with serving_metrics("127.0.0.1:0", registry) as address:
        assert (await scrape(address))["noria_test",] == 0
        held.append(1)
        assert (await scrape(address))["noria_test",] == 1
    assert Scrape(generate_latest(registry).decode())["noria_test",] == 1
    assert threads == {threading.main_thread()}


async def test_a_loop_that_stands_still_shows_as_overdue_and_gives_no_stale_figures(monkeypatch):
    monkeypatch.setattr(metrics, "_ANSWER_S", 0.01)
    registry, now = new_registry(), [100.0]
    registry.register(LiveCollector(lambda: [gauge("noria_test", "Things.", 1)]))
    LoopLag(registry, clock=lambda: now[0])
    now[0] += 7
    told = []
    thread = threading.Thread(target=lambda: told.append(generate_latest(registry).decode()))
    thread.start()
    thread.join()
    figures = Scrape(told[0])
    assert figures["noria_event_loop_overdue_seconds",] == 7
    assert ("noria_test",) not in figures


async def test_a_lag_is_how_late_a_timer_ran():
    registry, now = new_registry(), [100.0]
    lag = LoopLag(registry, clock=lambda: now[0])
    sampling = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    now[0] += 0.25 + 0.3
    lag.sample()
    sampling.cancel()
    figures = Scrape(generate_latest(registry).decode())
    assert figures["noria_event_loop_lag_seconds_count",] == 1
    assert figures["noria_event_loop_lag_seconds_sum",] == pytest.approx(0.3)
