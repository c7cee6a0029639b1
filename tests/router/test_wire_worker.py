"""What a worker of this version says of its load arrives; one of the version before says less."""

from noria.v1 import worker_pb2
from router.policy import Need, has_room
from router.wire_worker import load_report, worker_figures
from router.worker_state import PriorityLoad, WorkerState

LOAD = worker_pb2.Load(running=4, waiting=1, waiting_tokens=16, free_blocks=0)
HELLO = worker_pb2.WorkerHello(max_num_seqs=4, block_size=16, num_blocks=10)


def state(hello, load):
    made = WorkerState("w", worker_figures(hello), line=None)
    made.report(load_report(load, 0.0))
    return made


def test_a_load_by_priority_arrives_whole():
    told = worker_pb2.Load(preparing=3, priorities=[level(-1, 2, 3, 48, 5), level(6, 1, 0, 0, 9)])
    report = load_report(told, 2.5)
    assert report.preparing == 3
    assert report.priorities == (PriorityLoad(-1, 2, 3, 48, 5), PriorityLoad(6, 1, 0, 0, 9))


def test_a_worker_of_the_version_before_is_used_as_it_was():
    """It names no priorities: all that it holds is in everybody's way."""
    old = state(HELLO, LOAD)
    for priority in (-100, 0, 100):
        assert not has_room(old, Need(16, 32, priority=priority), 0.0)
    hello = worker_pb2.WorkerHello(yields_places=True)
    hello.MergeFrom(HELLO)
    load = worker_pb2.Load(priorities=[level(0, 4, 1, 16, 10)])
    load.MergeFrom(LOAD)
    new = state(hello, load)
    rooms = [has_room(new, Need(16, 32, priority=priority), 0.0) for priority in (-100, 0, 100)]
    assert rooms == [False, False, True]


def level(priority, running, waiting, waiting_tokens, yielded_blocks):
    return worker_pb2.PriorityLoad(
        priority=priority,
        running=running,
        waiting=waiting,
        waiting_tokens=waiting_tokens,
        yielded_blocks=yielded_blocks,
    )
