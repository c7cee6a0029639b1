"""Sequences that wait for their grammar. They hold no blocks and no place in the batch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from worker.grammar.compiler import Ticket
from worker.grammar.source import CompilerFailedError, GrammarError, GrammarSource
from worker.sequence import FinishReason, SequenceStatus
from worker.sequence import Sequence as LiveSequence


class Compiler(Protocol):
    """Where grammars come from."""

    def request(self, source: GrammarSource, count: int, salt: bytes) -> Ticket: ...


class _NoCompiler:
    def request(self, source: GrammarSource, count: int, salt: bytes) -> Ticket:
        del source, count, salt
        raise GrammarError("not supported by this worker")


NO_COMPILER: Compiler = _NoCompiler()


@dataclass(slots=True, eq=False)
class _Group:
    """The choices of one request, which need the same grammar."""

    source: GrammarSource
    choices: list[LiveSequence]
    ticket: Ticket
    is_prepared: bool = False

    @property
    def precedence(self) -> tuple[int, int]:
        """Smaller goes first."""
        return (-self.choices[0].priority, self.choices[0].order)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Choices whose wait is over: each has its matcher, or `field` cannot be used for `problem`,
    or the worker itself had a `failure`.
    """

    choices: Sequence[LiveSequence]
    field: str = ""
    problem: str = ""
    failure: str = ""


class GrammarLine:
    """Each request here waits for its own grammar, and for nobody else's; then for room."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._groups: list[_Group] = []

    def __len__(self) -> int:
        return sum(len(group.choices) for group in self._groups)

    def __iter__(self) -> Iterator[LiveSequence]:
        return chain.from_iterable(group.choices for group in self._groups)

    @property
    def next_deadline(self) -> float | None:
        """When the first of them would be late."""
        return min((s.deadline for s in self if s.deadline is not None), default=None)

    def add(self, source: GrammarSource, choices: Sequence[LiveSequence]) -> None:
        """Let a request's choices wait. Raises GrammarError, TooManyGrammarsError."""
        ticket = self._compiler.request(source, len(choices), choices[0].cache_salt)
        for choice in choices:
            choice.status = SequenceStatus.WAITING_FOR_GRAMMAR
        self._groups.append(_Group(source, list(choices), ticket))

    def take_prepared(
        self, has_room: Callable[[Sequence[LiveSequence]], bool]
    ) -> Iterator[Prepared]:
        """Those that have their grammar and room, the most urgent first; also those that will
        never have it. They are not here any more.

        `has_room` is asked of one request after what was told of those before it was done.
        """
        for group in self._groups[:]:
            if group.is_prepared or not group.ticket.is_done:
                continue
            prepared = _prepared(group)
            group.is_prepared = not (prepared.problem or prepared.failure)
            if not group.is_prepared:
                self._groups.remove(group)
                yield prepared
        ready = (group for group in self._groups if group.is_prepared)
        for group in sorted(ready, key=lambda group: group.precedence):
            if not has_room(group.choices):
                return
            self._groups.remove(group)
            yield Prepared(group.choices)

    def finish(self, sequence_id: int, reason: FinishReason) -> LiveSequence | None:
        """End one of them; None if it is not here."""
        for group in self._groups:
            for choice in group.choices:
                if choice.sequence_id == sequence_id:
                    self._take_out(group, choice)
                    choice.status, choice.finish_reason = SequenceStatus.FINISHED, reason
                    return choice
        return None

    def expire(self, now: float) -> list[LiveSequence]:
        """End every one whose deadline has passed."""
        late = [s.sequence_id for s in self if s.deadline is not None and s.deadline <= now]
        ended = [self.finish(sequence_id, FinishReason.EXPIRED) for sequence_id in late]
        return [sequence for sequence in ended if sequence is not None]

    def _take_out(self, group: _Group, choice: LiveSequence) -> None:
        group.choices.remove(choice)
        if not group.choices:
            group.ticket.cancel()
            self._groups.remove(group)


def _prepared(group: _Group) -> Prepared:
    try:
        matchers = group.ticket.result()
    except GrammarError as error:
        return Prepared(group.choices, group.source.field, str(error))
    except CompilerFailedError:
        return Prepared(group.choices, failure="the grammar's compiler failed")
    # Choices may have ended while they waited; those that are left have one each.
    for choice, matcher in zip(group.choices, matchers, strict=False):
        matcher.accept_all(choice.output_token_ids)
        choice.matcher = matcher
        choice.status = SequenceStatus.WAITING
        if matcher.problem:
            return Prepared(group.choices, "outputs", matcher.problem)
    return Prepared(group.choices)
