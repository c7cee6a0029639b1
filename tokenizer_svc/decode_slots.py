"""The decode slots of one router, and what waits to go back to it."""

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from noria.reasons import RequestError
from noria.service.limits import MAX_DECODE_SLOTS
from noria.service.outbox import Outbox
from noria.service.vocabulary import Vocabulary
from tokenizer_svc.decode_slot import DecodedText, DecodeSlot, SlotOptions
from tokenizer_svc.detokenizer import UnknownTokenError
from tokenizer_svc.stop import StopAutomaton


@dataclass
class PendingTexts:
    """What waits for one router: texts by slot, and whether to say that we are draining."""

    texts: dict[int, DecodedText] = field(default_factory=dict)
    draining: bool = False


def merge_pending(last: PendingTexts, new: PendingTexts) -> bool:
    """Fold `new` into `last`. A slot's texts become one; nothing follows a closed slot's."""
    for slot, text in new.texts.items():
        if slot not in last.texts:
            last.texts[slot] = text
        elif not last.texts[slot].merge(text):
            return False
    last.draining = last.draining or new.draining
    return True


class DecodeSlots:
    """Slots are opened, fed and closed here; what comes of it goes into the outbox.

    Every slot opened gets exactly one text that says `closed`: in answer to `close`, or with
    an error. An error closes that slot alone. Later calls for a closed or unknown slot are
    ignored: they were on their way when it closed.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_slots: int = MAX_DECODE_SLOTS,
    ) -> None:
        self._vocabulary = vocabulary
        self._clock = clock
        self._max_slots = max_slots
        self._slots: dict[int, DecodeSlot] = {}
        # Alive as long as a slot uses them: requests of one kind have the same stop strings.
        self._automata: weakref.WeakValueDictionary[tuple[str, ...], StopAutomaton] = (
            weakref.WeakValueDictionary()
        )
        self.outbox: Outbox[PendingTexts] = Outbox(merge_pending, clock=clock)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def open(self, slot: int, options: SlotOptions) -> None:
        """Open a slot; ids that the router already has are fed to it like any others."""
        if slot in self._slots:
            self.fail(slot, f"slot {slot} is open already")
        elif len(self._slots) >= self._max_slots:
            self.fail(slot, f"{len(self._slots)} slots are open; at most {self._max_slots}")
        else:
            try:
                self._slots[slot] = DecodeSlot(self._vocabulary, options, self._automaton)
            except RequestError as error:
                self.fail(slot, error.message)

    def feed(self, slot: int, token_ids: Sequence[int], wanted_ids: Sequence[int] = ()) -> None:
        """The slot's next ids, and ids whose own bytes are wanted."""
        decoder = self._slots.get(slot)
        if decoder is None or decoder.stop is not None:
            return
        answer = self._answer(slot, decoder)
        try:
            answer.pieces = decoder.pieces(wanted_ids)
            answer.text = [decoder.feed(token_ids)]
        except UnknownTokenError as error:
            self.fail(slot, f"token_ids: {error}")
            return
        answer.num_ids, answer.stop = decoder.num_ids, decoder.stop
        self._put(answer)

    def close(self, slot: int, *, flush: bool) -> None:
        """Close a slot; with `flush` the text held back comes out first."""
        decoder = self._slots.pop(slot, None)
        if decoder is None:
            return
        answer = self._answer(slot, decoder)
        answer.text = [decoder.flush()] if flush else []
        answer.num_ids, answer.stop, answer.closed = decoder.num_ids, decoder.stop, True
        self._put(answer)

    def fail(self, slot: int, error: str) -> None:
        """Close a slot with an error, whether or not it is open."""
        self._slots.pop(slot, None)
        self._put(DecodedText(slot, self._clock(), closed=True, error=error))

    def _automaton(self, stops: tuple[str, ...]) -> StopAutomaton:
        automaton = self._automata.get(stops)
        if automaton is None:
            automaton = self._automata[stops] = StopAutomaton(stops)
        return automaton

    def announce_draining(self) -> None:
        """Ask the router to open new slots elsewhere."""
        self.outbox.put(PendingTexts(draining=True))

    def _answer(self, slot: int, decoder: DecodeSlot) -> DecodedText:
        return DecodedText(slot, self._clock(), byte_offset=decoder.num_bytes)

    def _put(self, text: DecodedText) -> None:
        self.outbox.put(PendingTexts({text.slot: text}))
