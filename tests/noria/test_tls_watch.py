"""Certificates that expire are told of before they do; what a service serves follows its files."""

import time

import pytest
import structlog
import trustme
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from noria.service import tls_watch
from noria.service.tls_files import TlsFiles, TlsSource
from noria.service.tls_watch import TlsWatch
from tests.support.certificates import HOSTS, expiring_in, identified, write
from tests.support.waiting import until

DAY = 24 * 3600


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def source(tmp_path, authority):
    write(tmp_path, "a", authority.issue_cert(*HOSTS), authority)
    return TlsSource(TlsFiles(None, tmp_path / "a.pem", tmp_path / "a.key"))


@pytest.mark.parametrize(
    ("left", "events"),
    [
        ({"days": 15}, []),
        ({"days": 13}, ["certificate_expires"]),
        ({"seconds": -5}, ["certificate_expired"]),
    ],
)
def test_what_expires_within_two_weeks_is_logged_once_a_day(tmp_path, authority, left, events):
    write(tmp_path, "a", expiring_in(authority, **left), authority)
    source, now = TlsSource(TlsFiles(None, tmp_path / "a.pem", tmp_path / "a.key")), [time.time()]
    with structlog.testing.capture_logs() as lines:
        log = structlog.get_logger()
        watch = TlsWatch({"server": source, "client": None}, log, lambda: now[0])
        watch.warn()
        now[0] += DAY - 60
        watch.warn()
        assert [line["event"] for line in lines] == events
        now[0] += 120
        watch.warn()
    assert len(lines) == (2 if events else 1)


def test_a_certificate_that_lives_for_days_is_warned_of_in_the_last_third_of_its_life(
    tmp_path, authority
):
    """Certificates that are renewed every day do not fill the log."""
    for file, content in zip(("a.pem", "a.key"), identified(authority, "spiffe://x"), strict=True):
        (tmp_path / file).write_bytes(content)
    source, now = TlsSource(TlsFiles(None, tmp_path / "a.pem", tmp_path / "a.key")), [time.time()]
    with structlog.testing.capture_logs() as lines:
        watch = TlsWatch({"server": source}, structlog.get_logger(), lambda: now[0])
        watch.warn()
        assert not lines
        now[0] += DAY * 2 / 3
        watch.warn()
    assert [line["event"] for line in lines] == ["certificate_expires"]


async def test_the_metric_tells_what_is_left_and_follows_the_files(
    source, authority, tmp_path, monkeypatch
):
    """Broken files are told of once and leave what is served as it is."""
    monkeypatch.setattr(tls_watch, "POLL_S", 0.005)
    registry = CollectorRegistry()

    def left():
        text = generate_latest(registry).decode()
        return float(text.rpartition('{side="server"} ')[2])

    with structlog.testing.capture_logs() as lines:
        watch = TlsWatch({"server": source}, structlog.get_logger())
        async with watch.running(registry):
            assert left() > 365 * DAY
            (tmp_path / "a.pem").write_text("broken")
            await until(lambda: lines)
            assert left() > 365 * DAY
            write(tmp_path, "a", expiring_in(authority, days=20), authority)
            await until(lambda: left() < 20 * DAY)
            assert left() == pytest.approx(20 * DAY, abs=60)
    assert [line["event"] for line in lines][:1] == ["tls_files_refused"]
    assert "tls_files_read" in [line["event"] for line in lines]


def test_a_certificate_whose_expiry_cannot_be_read_is_served_and_said_once(source, monkeypatch):
    def fail(pem):
        raise ValueError

    monkeypatch.setattr(tls_watch, "validity_of", fail)
    with structlog.testing.capture_logs() as lines:
        watch = TlsWatch({"server": source}, structlog.get_logger())
        assert watch.seconds_left() == watch.seconds_left() == {}
        list(watch.collect())
    assert [line["event"] for line in lines] == ["certificate_expiry_unknown"]
