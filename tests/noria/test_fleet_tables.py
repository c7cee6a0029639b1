"""What `noria status`, `noria ps` and `noria drain` write, to the letter."""

import pytest

from noria.cli import fleet_tables
from noria.v1 import admin_pb2, common_pb2


def worker(worker_id="10.0.0.7:50053", state=admin_pb2.WORKER_STATE_READY, **fields):
    given = {
        "model": "chat", "running": 9, "waiting": 1, "max_num_seqs": 32, "num_blocks": 1000,
        "free_blocks": 620, "tokens_per_second": 402.4, "breaker": admin_pb2.BREAKER_STATE_CLOSED,
    }  # fmt: skip
    return admin_pb2.WorkerStatus(worker_id=worker_id, state=state, **(given | fields))


FLEET = admin_pb2.GetFleetResponse(
    router=admin_pb2.RouterStatus(
        instance_id="a1b2c3d4", version="0.1.0", uptime_s=11_520, ready=True, live_requests=13,
        queued_requests=3, max_queued_requests=1024,
    ),
    models=[
        admin_pb2.ModelStatus(name="chat", aliases=["gpt", "best"], queued_requests=3),
        admin_pb2.ModelStatus(name="gone", queued_requests=1),
    ],
    workers=[
        worker(),
        worker("10.0.0.8:50053", admin_pb2.WORKER_STATE_STALLED, step_age_s=75, free_blocks=1000),
        worker(
            "10.0.0.9:50053", admin_pb2.WORKER_STATE_FAILING,
            breaker=admin_pb2.BREAKER_STATE_HALF_OPEN, running=0, tokens_per_second=0,
        ),
        admin_pb2.WorkerStatus(
            worker_id="10.0.0.1:50053", state=admin_pb2.WORKER_STATE_UNREACHABLE
        ),
    ],
    tokenizers=[
        admin_pb2.TokenizerStatus(address="10.0.0.2:50052", model="chat", up=True, open_outputs=13),
        admin_pb2.TokenizerStatus(address="10.0.0.3:50052"),
    ],
    store=admin_pb2.StoreStatus(shared=True, up=True),
)  # fmt: skip

STATUS = """\
router a1b2c3d4 (0.1.0): ready, up 3h12m
requests: 13 being answered, 3 of 1024 queued
store: Redis

MODEL  WORKERS    RUNNING  WAITING  QUEUED  KV   TOKENS/S  ALIASES
chat   1/3 ready  18/96    3        3       25%  805       gpt, best
gone   0/0 ready  0/0      0        1       -    0         -

WORKER          MODEL  STATE          RUNNING  WAITING  KV   TOKENS/S  BREAKER
10.0.0.7:50053  chat   ready          9/32     1        38%  402       closed
10.0.0.8:50053  chat   stalled 1m15s  9/32     1        0%   402       closed
10.0.0.9:50053  chat   failing        0/32     1        38%  0         half-open
10.0.0.1:50053  -      unreachable    -        -        -    -         -

TOKENIZER       MODEL  STATE  OPEN
10.0.0.2:50052  chat   up     13
10.0.0.3:50052  -      away   0"""


def test_the_status_of_a_fleet():
    assert fleet_tables.status(FLEET) == STATUS


def test_a_router_alone_says_that_nothing_is_there():
    told = fleet_tables.status(admin_pb2.GetFleetResponse())
    assert "not ready" in told
    assert "store: this router's own" in told


def test_the_live_requests_and_how_many_are_not_shown():
    listed = admin_pb2.ListRequestsResponse(total=3)
    listed.requests.add(
        request_id="req-1", tenant="team", model="chat", phase=common_pb2.PHASE_KIND_BATCH_WAIT,
        age_s=3.24, input_tokens=41, output_tokens=17, worker_id="10.0.0.7:50053",
    )  # fmt: skip
    listed.requests.add(request_id="req-2", tenant="team", phase=common_pb2.PHASE_KIND_ADMISSION)
    assert (
        fleet_tables.requests(listed)
        == """\
REQUEST  TENANT  MODEL  PHASE       AGE   IN  OUT  WORKER
req-1    team    chat   batch-wait  3.2s  41  17   10.0.0.7:50053
req-2    team    -      admission   0.0s  -   0    -
... and 1 more"""
    )


@pytest.mark.parametrize(
    ("others", "undo", "left", "says"),
    [
        (2, False, 10, "w takes nothing new; 10 sequences left; 2 other workers of chat"),
        (1, False, 0, "w takes nothing new; it is empty; 1 other worker of chat"),
        (0, False, 1, "w takes nothing new; 1 sequence left\nno other worker serves chat: "),
        (0, True, 1, "w takes requests again"),
    ],
)
def test_what_a_drain_did(others, undo, left, says):
    response = admin_pb2.DrainWorkerResponse(
        worker=worker("w", running=left, waiting=0), others_ready=others
    )
    assert fleet_tables.drained(response, undo=undo).startswith(says)


def test_names_from_elsewhere_do_not_steer_the_terminal():
    hostile = admin_pb2.GetFleetResponse(
        models=[admin_pb2.ModelStatus(name="a\x1b[2J\nb", aliases=["c\rd"])],
        workers=[worker("e\x07f", model="a\x1b[2J\nb")],
    )
    told = fleet_tables.status(hostile)
    assert not [c for c in told if ord(c) < 32 and c != "\n"]


@pytest.mark.parametrize(
    ("seconds", "says"),
    [(0, "0.0s"), (59.9, "59.9s"), (61, "1m01s"), (3660, "1h01m"), (90_000, "1d01h")],
)
def test_an_age_is_short(seconds, says):
    assert fleet_tables._age(seconds) == says
