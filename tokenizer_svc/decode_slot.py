"""One output on its way from ids to text: characters, stop strings, byte offsets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from noria.reasons import invalid_field
from noria.service.limits import (
    MAX_STOP_SEQUENCE_BYTES,
    MAX_STOP_SEQUENCES,
    MAX_STOP_SEQUENCES_BYTES,
)
from noria.service.vocabulary import Vocabulary
from tokenizer_svc.detokenizer import Detokenizer, piece_of
from tokenizer_svc.stop import StopAutomaton, StopMatcher


@dataclass(frozen=True)
class SlotOptions:
    """How a slot decodes; with the ids, all that its text depends on."""

    stop_sequences: tuple[str, ...] = ()
    min_tokens: int = 0
    skip_special: bool = True


@dataclass(frozen=True)
class StopFound:
    """Which stop string matched, and the output id (from 0) that completed it."""

    index: int
    token_index: int


@dataclass
class DecodedText:
    """What became of some ids of a slot. Texts that wait for a slow reader are merged.

    `byte_offset` is where the text begins in the output, in UTF-8 bytes. `num_ids` counts
    the output ids accounted for so far, those of held-back text included. `arrived_at` is
    the clock's time when the (oldest) ids arrived.
    """

    slot: int
    arrived_at: float
    byte_offset: int = 0
    text: list[str] = field(default_factory=list)
    num_ids: int = 0
    stop: StopFound | None = None
    closed: bool = False
    pieces: list[bytes] = field(default_factory=list)
    error: str = ""

    def merge(self, later: "DecodedText") -> bool:
        """Take in what follows on the same slot; False after the last of the slot's texts."""
        if self.closed:
            return False
        self.text += later.text
        self.pieces += later.pieces
        self.num_ids = max(self.num_ids, later.num_ids)
        self.stop = self.stop or later.stop
        self.closed, self.error = later.closed, later.error
        return True


class DecodeSlot:
    """Decodes one output. A deterministic function of its options and ids.

    `automaton_of` gives the automaton of stop strings that were checked. Raises RequestError
    (INVALID_FIELD) for bad stop strings.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        options: SlotOptions,
        automaton_of: Callable[[tuple[str, ...]], StopAutomaton] = StopAutomaton,
    ) -> None:
        check_stop_sequences(options.stop_sequences)
        self._vocabulary = vocabulary
        self._min_tokens = options.min_tokens
        self._detokenizer = Detokenizer(vocabulary, skip_special=options.skip_special)
        stops = options.stop_sequences
        self._matcher = StopMatcher(automaton_of(stops)) if stops else None
        self.num_ids = 0
        self.num_bytes = 0
        self.stop: StopFound | None = None

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that became certain. Ids after a stop string are not accounted for.

        Raises UnknownTokenError; the slot is then of no further use.
        """
        parts = []
        for token_id in token_ids:
            if self.stop is not None:
                break
            text = self._detokenizer.push(token_id)
            self.num_ids += 1
            parts.append(self._certain(text))
        return self._counted("".join(parts))

    def flush(self) -> str:
        """The text held back, when nothing follows: a cut character, a stop string's beginning."""
        if self.stop is not None:
            return ""
        last = self._certain(self._detokenizer.flush())
        held = self._matcher.flush() if self._matcher else ""
        return self._counted(last + held)

    def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes of single ids; none for ids that a model has beyond the vocabulary."""
        known = range(len(self._vocabulary))
        return [piece_of(self._vocabulary, i) if i in known else b"" for i in token_ids]

    def _certain(self, text: str) -> str:
        if self._matcher is None or not text:
            return text
        certain, index = self._matcher.push(text, counts=self.num_ids >= self._min_tokens)
        if index is not None:
            self.stop = StopFound(index, self.num_ids - 1)
        return certain

    def _counted(self, text: str) -> str:
        self.num_bytes += len(text.encode())
        return text


def check_stop_sequences(stops: Sequence[str]) -> None:
    """Raises RequestError (INVALID_FIELD) naming the stop string and both numbers."""
    if len(stops) > MAX_STOP_SEQUENCES:
        raise invalid_field("stop_sequences", f"{len(stops)} strings; at most {MAX_STOP_SEQUENCES}")
    sizes = [len(stop.encode()) for stop in stops]
    for i, size in enumerate(sizes):
        if not 1 <= size <= MAX_STOP_SEQUENCE_BYTES:
            problem = f"{size} bytes; from 1 to {MAX_STOP_SEQUENCE_BYTES}"
            raise invalid_field(f"stop_sequences[{i}]", problem)
    if sum(sizes) > MAX_STOP_SEQUENCES_BYTES:
        problem = f"{sum(sizes)} bytes together; at most {MAX_STOP_SEQUENCES_BYTES}"
        raise invalid_field("stop_sequences", problem)
