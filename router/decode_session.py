"""One bidirectional stream to the tokenizer that carries all open decode slots.

Slots outlive connections: `serve` opens every slot again with its ids so far. Slots
are numbered once and never reused.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import grpc

from noria.reasons import RequestError
from noria.service.outbox import Outbox
from noria.v1 import tokenizer_pb2
from router import wire_tokenizer
from router.connection import writing
from router.decode_slot import DecodeSlot

DecodeCall = grpc.aio.StreamStreamCall[
    tokenizer_pb2.DecodeSessionRequest, tokenizer_pb2.DecodeSessionResponse
]
_RESPONSE = tokenizer_pb2.DecodeSessionResponse


@dataclass(slots=True)
class _Batch:
    """What waits for the writer: per slot its new ids, and ids whose bytes are wanted."""

    deltas: dict[int, tuple[list[int], list[int]]]


_Item = _Batch | tokenizer_pb2.DecodeSessionRequest


class DecodeSession:
    """The `SlotPort` of all slots; works while there is no connection, too."""

    def __init__(self) -> None:
        self._slots: dict[int, DecodeSlot] = {}
        self._outbox: Outbox[_Item] | None = None
        self._model = ""
        self._last_number = 0

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def open(self, slot: DecodeSlot) -> int:
        self._last_number += 1
        self._slots[self._last_number] = slot
        self._put(wire_tokenizer.decode_open(slot, self._last_number, self._model))
        return self._last_number

    def feed(self, number: int, token_ids: Sequence[int], wanted_ids: Sequence[int]) -> None:
        self._put(_Batch({number: (list(token_ids), list(wanted_ids))}))

    def finish(self, number: int) -> None:
        self._put(wire_tokenizer.decode_close(number, flush=True))

    def close(self, number: int, *, tell: bool) -> None:
        del self._slots[number]
        if tell:
            self._put(wire_tokenizer.decode_close(number, flush=False))

    def fail_all(self, error: RequestError) -> None:
        """End every slot with an error."""
        for slot in list(self._slots.values()):
            slot.fail(error)

    async def serve(self, call: DecodeCall, model: str, on_draining: Callable[[], None]) -> None:
        """Carry all slots over this call until it breaks. Raises grpc.aio.AioRpcError."""
        self._model = model
        self._outbox = Outbox[_Item](_merge)
        for number, slot in self._slots.items():
            self._reopen(number, slot)
        try:
            async with writing(call, self._outbox, _to_wire):
                while isinstance(response := await call.read(), _RESPONSE):
                    if response.HasField("draining"):
                        on_draining()
                    else:
                        self._receive(response.batch.texts)
        finally:
            self._outbox = None

    def _receive(self, texts: Iterable[tokenizer_pb2.DecodedText]) -> None:
        for decoded in texts:
            slot = self._slots.get(decoded.slot)
            if slot is not None:
                slot.receive(wire_tokenizer.slot_text(decoded))

    def _reopen(self, number: int, slot: DecodeSlot) -> None:
        self._put(wire_tokenizer.decode_open(slot, number, self._model))
        if slot.wanted_ids:
            self.feed(number, (), slot.wanted_ids)
        if slot.finishing:
            self.finish(number)

    def _put(self, item: _Item) -> None:
        # Without a connection nothing needs to wait here: the slot keeps its ids.
        if self._outbox is not None:
            self._outbox.put(item)


def _merge(last: _Item, new: _Item) -> bool:
    """Add new ids to a batch that still waits."""
    if not (isinstance(last, _Batch) and isinstance(new, _Batch)):
        return False
    for number, (token_ids, wanted_ids) in new.deltas.items():
        ids, wanted = last.deltas.setdefault(number, ([], []))
        ids.extend(token_ids)
        wanted.extend(wanted_ids)
    return True


def _to_wire(item: _Item) -> tokenizer_pb2.DecodeSessionRequest:
    if not isinstance(item, _Batch):
        return item
    deltas = [
        tokenizer_pb2.DecodeDelta(slot=number, token_ids=token_ids, alternative_ids=wanted_ids)
        for number, (token_ids, wanted_ids) in item.deltas.items()
    ]
    return tokenizer_pb2.DecodeSessionRequest(batch=tokenizer_pb2.DecodeBatch(deltas=deltas))
