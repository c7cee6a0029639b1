"""One request's place at a tokenizer: ids in, text out, over as many sessions as it takes.

Decoding is a deterministic function of the options and the ids. When a session breaks,
the slot is opened again with all ids so far, and text below the byte offset that was
already passed on is dropped: the reader sees a pause, no gap and no repetition.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from noria.reasons import Reason, RequestError


@dataclass(frozen=True, slots=True)
class SlotOptions:
    """How a request's ids become text."""

    stop_sequences: tuple[str, ...]
    min_tokens: int
    skip_special_tokens: bool
    prompt_tail_ids: Sequence[int]
    starts_in_thinking: bool


@dataclass(frozen=True, slots=True)
class SlotText:
    """What the tokenizer made of a slot's ids.

    `text` begins at `byte_offset` (UTF-8) and accounts, with what came before, for
    `num_ids` ids. `stop` is (index of the stop string, index of the completing id).
    `pieces` are bytes of ids that were wanted, in the order in which they were.
    `duration_us` is what the tokenizer took for it.
    """

    byte_offset: int
    text: str
    num_ids: int
    stop: tuple[int, int] | None = None
    closed: bool = False
    failed: bool = False
    duration_us: int = 0
    pieces: Sequence[bytes] = ()


class TextSink(Protocol):
    """Whoever passes text on; called synchronously, never after the slot's block."""

    def on_text(self, text: str, num_ids: int, pieces: Sequence[bytes] = ()) -> None: ...

    def on_stop(self, stop_index: int, token_index: int, duration_us: int) -> None: ...

    def on_text_end(self, duration_us: int) -> None: ...

    def on_failed(self, error: RequestError) -> None: ...


class SlotPort(Protocol):
    """The side of a decode session that slots talk to; nothing here blocks."""

    def open(self, slot: "DecodeSlot") -> int: ...

    def feed(self, number: int, token_ids: Sequence[int], wanted_ids: Sequence[int]) -> None: ...

    def finish(self, number: int) -> None: ...

    def close(self, number: int, *, tell: bool) -> None: ...


@dataclass(slots=True, eq=False)
class DecodeSlot:
    """A context manager; opened at the tokenizer with the first ids.

    `finishing`: all ids are there and what is held back shall come out. `wanted_ids` are
    those whose bytes have not come yet.
    """

    options: SlotOptions
    sink: TextSink
    port: SlotPort
    token_ids: list[int] = field(default_factory=list)
    wanted_ids: list[int] = field(default_factory=list)
    finishing: bool = False
    _number: int | None = None
    _passed_bytes: int = 0
    _over: bool = False
    _closed_there: bool = False

    def __enter__(self) -> "DecodeSlot":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def feed(self, token_ids: Sequence[int], wanted_ids: Sequence[int] = ()) -> None:
        """The next ids, and ids whose own bytes are wanted."""
        if self._over or not (token_ids or wanted_ids):
            return
        if self._number is None:
            self._number = self.port.open(self)
        self.token_ids.extend(token_ids)
        self.wanted_ids.extend(wanted_ids)
        self.port.feed(self._number, token_ids, wanted_ids)

    def finish(self) -> None:
        """No more ids; the sink hears `on_text_end` once all text is out."""
        if self._over or self.finishing:
            return
        self.finishing = True
        if self._number is None:
            self._over = True
            self.sink.on_text_end(0)
        else:
            self.port.finish(self._number)

    def receive(self, decoded: SlotText) -> None:
        """The tokenizer's next word on this slot."""
        if self._over:
            return
        if decoded.failed:
            self._closed_there = True
            self.fail(RequestError(Reason.INTERNAL, "the output could not be decoded"))
            return
        self._closed_there = decoded.closed
        if not self._pass_on(decoded):
            return
        if decoded.stop is not None:
            self._leave()
            self.sink.on_stop(*decoded.stop, decoded.duration_us)
        elif decoded.closed:
            self._leave()
            self.sink.on_text_end(decoded.duration_us)

    def fail(self, error: RequestError) -> None:
        """Nothing more can come."""
        if not self._over:
            self._leave()
            self.sink.on_failed(error)

    def _pass_on(self, decoded: SlotText) -> bool:
        text = decoded.text
        if decoded.byte_offset != self._passed_bytes:
            remaining = self._unseen(decoded)
            if remaining is None:
                self.fail(RequestError(Reason.INTERNAL, "the output was decoded in two ways"))
                return False
            text = remaining
        self._passed_bytes += len(text.encode())
        del self.wanted_ids[: len(decoded.pieces)]
        self.sink.on_text(text, decoded.num_ids, decoded.pieces)
        return True

    def _unseen(self, decoded: SlotText) -> str | None:
        """The text beyond what was passed on; None if it cannot continue it."""
        known = self._passed_bytes - decoded.byte_offset
        if known < 0:
            return None
        try:
            return decoded.text.encode()[known:].decode()
        except UnicodeDecodeError:
            return None

    def _leave(self) -> None:
        if not self._over:
            self._over = True
            if self._number is not None:
                self.port.close(self._number, tell=not (self._closed_there or self.finishing))
