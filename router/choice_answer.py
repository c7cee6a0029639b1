"""One choice of an answer: its ids go to the tokenizer, its text becomes events."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from noria.reasons import RequestError
from router.delivery import Delivery
from router.events import (
    BlockStart,
    BlockStop,
    Event,
    MessageEnd,
    MessageStart,
    MessageStop,
    PromptDelta,
    StopReason,
    TextDelta,
    TokenInfo,
)
from router.record import RequestRecord
from router.token_infos import TokenInfos
from router.worker_news import Finish, NewTokens

_STOP_REASONS = {
    Finish.EOS: StopReason.END_TURN,
    Finish.LENGTH: StopReason.MAX_TOKENS,
    Finish.STOP_ID: StopReason.STOP_SEQUENCE,
}

# So many are turned into one message, between which others have their turn.
_PROMPT_TOKENS_PER_EVENT = 64


class IdsToText(Protocol):
    """A decode slot."""

    def feed(self, token_ids: Sequence[int], wanted_ids: Sequence[int] = ()) -> None: ...

    def finish(self) -> None: ...


class WholeAnswer(Protocol):
    """What a choice tells the answer that it belongs to."""

    def on_choice_ended(self, index: int, duration_us: int) -> bool: ...

    def on_failed(self, error: RequestError) -> None: ...


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What stands before the first token; `tells_prompt`: the first choice tells of its ids."""

    request_id: str
    model: str
    prompt_token_ids: Sequence[int]
    stop_sequences: tuple[str, ...]
    tells_prompt: bool = False


class ChoiceAnswer:
    """Sink of one choice's ids and of its text; its decode slot is bound once it exists.

    The last id of an output that EOS or a stop id ended is counted, and never reaches the
    tokenizer: it is no text.
    """

    def __init__(
        self,
        index: int,
        head: AnswerHead,
        record: RequestRecord,
        delivery: Delivery,
        whole: WholeAnswer,
    ) -> None:
        self.slot: IdsToText | None = None
        self.ended = False
        self._index = index
        self._head = head
        self._record = record
        self._delivery = delivery
        self._whole = whole
        self._block_begun = False
        self._num_ids = 0
        self._stop_reason = StopReason.END_TURN
        # Records wait for the text of their ids: (ids that text must account for, record).
        self._steps: deque[tuple[int, object]] = deque()
        self._infos = TokenInfos()

    def start(self) -> None:
        """The request has left the queue."""
        head = self._head
        input_tokens = len(head.prompt_token_ids)
        start = MessageStart(head.request_id, head.model, input_tokens, self._index)
        self._delivery.put(start)
        if head.tells_prompt and not self._index:
            self._feed((), self._infos.begin_prompt(head.prompt_token_ids))

    def begin_attempt(self) -> None:
        """Records of an attempt that was given up stay untold."""
        self._steps.clear()
        self._infos.begin_attempt()

    # From the worker.

    def on_tokens(self, new: NewTokens) -> None:
        wanted = self._infos.add_prompt(new.prompt)
        wanted += self._infos.add(self._num_ids, new.token_ids, new.chosen)
        accounted = self._num_ids
        for step in new.steps:
            accounted += step.chose_token
            self._steps.append((accounted, step.record))
        self._num_ids += len(new.token_ids)
        self._feed(new.token_ids[:-1] if new.last_is_end else new.token_ids, wanted)

    def on_finished(self, finish: Finish) -> None:
        """All ids are there."""
        self._stop_reason = _STOP_REASONS[finish]
        if self.slot is not None and not self.ended:
            self.slot.finish()

    # From the tokenizer.

    def on_text(self, text: str, num_ids: int, pieces: Sequence[bytes] = ()) -> None:
        if self.ended:
            return
        self._infos.add_pieces(pieces)
        self._tell_prompt(self._infos.take_prompt())
        infos = self._infos.take(num_ids)
        if text or infos:
            self._record.has_text_of(num_ids, self._index)
            self._put_delta(text, self._take_steps(num_ids), infos)

    def on_stop(self, stop_index: int, token_index: int, duration_us: int) -> None:
        if self.ended:
            return
        self._num_ids = token_index + 1
        self._stop_reason = StopReason.STOP_SEQUENCE
        last_steps = self._take_steps(token_index + 1)
        last_infos = self._infos.take(token_index + 1)
        self._end(self._head.stop_sequences[stop_index], last_steps, last_infos, duration_us)

    def on_text_end(self, duration_us: int) -> None:
        if not self.ended:
            last_steps = [record for _, record in self._steps]
            self._end(None, last_steps, self._infos.take(), duration_us)

    # From both.

    def on_failed(self, error: RequestError) -> None:
        self._whole.on_failed(error)

    def _feed(self, token_ids: Sequence[int], wanted_ids: Sequence[int]) -> None:
        if self.slot is not None and not self.ended:
            self.slot.feed(token_ids, wanted_ids)

    def _tell_prompt(self, tokens: list[TokenInfo]) -> None:
        for first in range(0, len(tokens), _PROMPT_TOKENS_PER_EVENT):
            part = tokens[first : first + _PROMPT_TOKENS_PER_EVENT]
            self._put(PromptDelta(part, self._index))

    def _end(
        self,
        stop_sequence: str | None,
        last_steps: list[object],
        last_infos: list[TokenInfo],
        duration_us: int,
    ) -> None:
        self._record.choice_ended(self._index, self._stop_reason, self._num_ids)
        if last_steps or last_infos:
            self._put_delta("", last_steps, last_infos)
        self._begin_block()
        self.ended = True
        is_last = self._whole.on_choice_ended(self._index, duration_us)
        usage = replace(self._record.usage, output_tokens=self._num_ids)
        end = MessageEnd(self._stop_reason, stop_sequence, usage, self._index, is_last)
        self._delivery.put(BlockStop(self._index))
        self._delivery.put(end)
        self._delivery.put(MessageStop(self._index))
        if is_last:
            self._delivery.close()

    def _begin_block(self) -> None:
        if not self._block_begun:
            self._block_begun = True
            self._delivery.put(BlockStart(self._index))

    def _put_delta(self, text: str, steps: list[object], infos: list[TokenInfo]) -> None:
        self._begin_block()
        self._put(TextDelta(text, steps, infos, self._index))

    def _put(self, event: Event) -> None:
        self._delivery.put(event)
        overdue = self._delivery.overdue()
        if overdue is not None:
            self.on_failed(overdue)

    def _take_steps(self, num_ids: int) -> list[object]:
        taken = []
        while self._steps and self._steps[0][0] <= num_ids:
            taken.append(self._steps.popleft()[1])
        return taken
