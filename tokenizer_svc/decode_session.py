"""One router's DecodeSession: its messages to the slots, and their texts back to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from noria.reasons import Reason, RequestError
from noria.service.limits import SESSION_STALL_SECONDS
from noria.service.outbox import Outbox, OutboxClosedError
from noria.service.tasks import all_of, first_of
from noria.v1 import tokenizer_pb2
from tokenizer_svc.decode_slots import DecodeSlots, PendingTexts
from tokenizer_svc.text_service import TextService
from tokenizer_svc.translate import responses, slot_options

# Ids decoded at a stretch before other calls get their turn.
IDS_PER_TURN = 4096
# How often a session's writer is looked at.
_WATCH_S = 0.5


async def serve_session(
    requests: AsyncIterator[tokenizer_pb2.DecodeSessionRequest],
    write: Callable[[tokenizer_pb2.DecodeSessionResponse], Coroutine[Any, Any, None]],
    slots: DecodeSlots,
    text: TextService,
    *,
    on_ids: Callable[[int], None],
    clock: Callable[[], float],
) -> None:
    """Decode until the router ends its side and all texts are written.

    `on_ids` hears how many ids each message brought. Raises RequestError (SLOW_READER).
    """
    both = all_of(_read(requests, slots, text, on_ids), _write(slots.outbox, write, clock))
    await first_of(both, _watch(slots.outbox))


async def _read(
    requests: AsyncIterator[tokenizer_pb2.DecodeSessionRequest],
    slots: DecodeSlots,
    text: TextService,
    on_ids: Callable[[int], None],
) -> None:
    """Take in the router's messages until it ends its side; the outbox then closes."""
    try:
        async for request in requests:
            on_ids(_num_ids(request))
            await _apply(request, slots, text)
    finally:
        slots.outbox.close()


def _num_ids(request: tokenizer_pb2.DecodeSessionRequest) -> int:
    """How many ids a message brings to be decoded."""
    fed = sum(len(delta.token_ids) for delta in request.batch.deltas)
    return fed + len(request.open.output_token_ids)


async def _apply(
    request: tokenizer_pb2.DecodeSessionRequest, slots: DecodeSlots, text: TextService
) -> None:
    match request.WhichOneof("message"):
        case "open":
            await _open(request.open, slots, text)
        case "batch":
            for delta in request.batch.deltas:
                wanted = [*delta.token_ids] if delta.want_pieces else []
                await _feed(slots, delta.slot, delta.token_ids, [*wanted, *delta.alternative_ids])
        case "close":
            slots.close(request.close.slot, flush=request.close.flush)
        case _:
            # A message of a later version: nothing to do.
            pass


async def _open(opened: tokenizer_pb2.DecodeOpen, slots: DecodeSlots, text: TextService) -> None:
    try:
        text.check_model(opened.model)
    except RequestError as error:
        slots.fail(opened.slot, error.message)
        return
    slots.open(opened.slot, slot_options(opened))
    if opened.output_token_ids:
        await _feed(slots, opened.slot, opened.output_token_ids)


async def _feed(
    slots: DecodeSlots, slot: int, token_ids: Sequence[int], wanted_ids: Sequence[int] = ()
) -> None:
    """Feed a slot; a long list in parts, between which other calls get their turn."""
    slots.feed(slot, token_ids[:IDS_PER_TURN], wanted_ids)
    for start in range(IDS_PER_TURN, len(token_ids), IDS_PER_TURN):
        await asyncio.sleep(0)
        slots.feed(slot, token_ids[start : start + IDS_PER_TURN])


async def _watch(outbox: Outbox[PendingTexts]) -> None:
    """Give up on a router that reads nothing, also while it says nothing."""
    while (waited_s := outbox.waiting_s()) <= SESSION_STALL_SECONDS:  # noqa: ASYNC110
        await asyncio.sleep(_WATCH_S)
    raise RequestError(
        Reason.SLOW_READER,
        f"texts have waited for {waited_s:.0f} s to be read; at most {SESSION_STALL_SECONDS:.0f} s",
    )


async def _write(
    outbox: Outbox[PendingTexts],
    write: Callable[[tokenizer_pb2.DecodeSessionResponse], Coroutine[Any, Any, None]],
    clock: Callable[[], float],
) -> None:
    with contextlib.suppress(OutboxClosedError):
        while True:
            for pending in await outbox.take():
                for response in responses(pending, clock()):
                    await write(response)
