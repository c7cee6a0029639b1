"""One submit that the engine has: its choices, and what has become of each."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from noria.v1 import worker_pb2
from worker.accounting import NOTHING, Work, work_of
from worker.engine_output import Ended, Refusal
from worker.sequence import Sequence
from worker.translate import finished_from, wire_work


@dataclass(slots=True, eq=False)
class Submission:
    """Over once each of its choices is; then it has exactly one terminal entry.

    `name` is the router's id for it. `first` is choice 0, with its siblings.
    """

    number: int
    name: str
    first: Sequence
    ended: list[Ended] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return len(self.ended) == 1 + len(self.first.siblings)

    @property
    def work(self) -> Work:
        """What was computed for those of its choices that have ended."""
        return work_of(self.ended)

    def sequence_ids(self) -> Iterator[int]:
        yield self.first.sequence_id
        for sibling in self.first.siblings:
            yield sibling.sequence_id

    def terminal(self) -> worker_pb2.Terminal:
        """The last entry of a submit that ran; one choice's failure is that of all."""
        terminal = worker_pb2.Terminal(submit_number=self.number)
        failed = next((ended for ended in self.ended if ended.failure), None)
        if failed is not None:
            invalid, internal = worker_pb2.REFUSAL_CODE_INVALID, worker_pb2.REFUSAL_CODE_INTERNAL
            terminal.refused.code = invalid if failed.field else internal
            terminal.refused.message = failed.failure
            terminal.refused.field = failed.field
            if (work := self.work) != NOTHING:
                terminal.refused.work.CopyFrom(wire_work(work))
        else:
            in_order = sorted(self.ended, key=lambda ended: ended.sequence.choice)
            terminal.finished.CopyFrom(finished_from(in_order))
        return terminal

    def refused(self, refusal: Refusal) -> worker_pb2.Terminal:
        """The last entry of a submit that was never taken."""
        full, invalid = worker_pb2.REFUSAL_CODE_FULL, worker_pb2.REFUSAL_CODE_INVALID
        refused = worker_pb2.Refused(
            code=full if refusal.full else invalid, message=refusal.message, field=refusal.field
        )
        return worker_pb2.Terminal(submit_number=self.number, refused=refused)
