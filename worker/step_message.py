"""All that steps produced for one router, merged while it reads slowly."""

from dataclasses import dataclass, field

from noria.v1 import worker_pb2
from worker.accounting import NOTHING, Work

# Log-probabilities of prompts that one message carries before another is begun: 16 MiB.
_MAX_PROMPT_LOGPROBS = 1 << 21


@dataclass(slots=True)
class StepMessage:
    """What waits for one router: deltas by (submit number, choice), and terminal entries.

    `work` is what these entries tell of.
    """

    step_number: int = 0
    deltas: dict[tuple[int, int], worker_pb2.Delta] = field(default_factory=dict)
    terminals: list[worker_pb2.Terminal] = field(default_factory=list)
    load: worker_pb2.Load = field(default_factory=worker_pb2.Load)
    num_prompt_logprobs: int = 0
    work: Work = NOTHING

    def add_terminal(self, terminal: worker_pb2.Terminal, work: Work = NOTHING) -> None:
        self.terminals.append(terminal)
        self.work += work

    def add_delta(self, delta: worker_pb2.Delta) -> None:
        key = (delta.submit_number, delta.choice)
        told = delta.prompt_logprobs
        self.num_prompt_logprobs += len(told.logprobs) + len(told.alternative_ids)
        if key in self.deltas:
            self.deltas[key].MergeFrom(delta)
        else:
            self.deltas[key] = delta

    def to_proto(self) -> worker_pb2.SessionResponse:
        if not self.deltas and not self.terminals:
            return worker_pb2.SessionResponse(load=self.load)
        step = worker_pb2.Step(
            step_number=self.step_number,
            deltas=self.deltas.values(),
            terminals=self.terminals,
            load=self.load,
        )
        return worker_pb2.SessionResponse(step=step)


def merge_steps(last: StepMessage, new: StepMessage) -> bool:
    """Fold `new` into `last`; a delta of a submit never comes after its terminal entry.

    False where the message would grow too large to be read.
    """
    if last.num_prompt_logprobs + new.num_prompt_logprobs > _MAX_PROMPT_LOGPROBS:
        return False
    last.step_number = max(last.step_number, new.step_number)
    for delta in new.deltas.values():
        last.add_delta(delta)
    last.terminals.extend(new.terminals)
    last.work += new.work
    last.load = new.load
    return True
