"""All tokenizer services: which one a model's requests go to.

While a model's tokenizers are away, new requests wait for one up to a patience, and end with
NO_TOKENIZER after that. Models whose tokenizers are there go on meanwhile.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import grpc
import structlog

from noria.reasons import Reason, RequestError
from noria.service.tls_files import TlsSource
from noria.v1 import tokenizer_pb2
from router.decode_slot import SlotPort
from router.prompt_size import check_fits
from router.registry import Registry
from router.requests import EncodedPrompt, Prompt, RawIds, check_ids
from router.tokenizer import Tokenizer, request_error


class Tokenizers:
    """The tokenizers at these addresses.

    `on_change` is called when one comes or goes, `on_new_vocabulary` when models have got
    another vocabulary: whatever ids were made for them before mean something else now.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        registry: Registry,
        *,
        tls: TlsSource | None,
        patience_s: float,
        on_change: Callable[[], None],
        on_new_vocabulary: Callable[[frozenset[str]], None],
        clock: Callable[[], float],
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._registry = registry
        self._patience_s = patience_s
        self._tell_change = on_change
        self._on_new_vocabulary = on_new_vocabulary
        self._clock = clock
        self._log = log
        self._news = asyncio.Event()
        self._all = [
            Tokenizer(
                address,
                tls=tls,
                patience_s=patience_s,
                on_info=self._introduce,
                on_change=self._on_change,
                log=log,
            )
            for address in addresses
        ]

    def __iter__(self) -> Iterator[Tokenizer]:
        return iter(self._all)

    @contextlib.asynccontextmanager
    async def encoding(self) -> AsyncIterator[None]:
        """Inside the block `encode` may be called, whether or not the tokenizers run."""
        async with contextlib.AsyncExitStack() as held:
            for tokenizer in self:
                await held.enter_async_context(tokenizer.encoding())
            yield

    @property
    def num_slots(self) -> int:
        return sum(tokenizer.slots.num_slots for tokenizer in self)

    def is_up(self, model: str) -> bool:
        """Whether one of the model's tokenizers is there."""
        return any(tokenizer.is_up for tokenizer in self._having(model))

    def slots(self, model: str) -> SlotPort:
        """Where a request's slots are opened: the tokenizer with the fewest, of those there.

        Raises NO_TOKENIZER.
        """
        return self._best(model).slots

    async def encode(
        self, model: str, prompt: Prompt, deadline: float, traceparent: str
    ) -> EncodedPrompt:
        """The prompt's ids for a model. Waits for a tokenizer that is away, up to the patience.

        Raises what the tokenizer refuses, NO_TOKENIZER, DEADLINE_EXCEEDED, and
        CONTEXT_LENGTH_EXCEEDED for a text that is too long whatever its ids are.
        """
        facts = self._best(model).facts
        if isinstance(prompt, RawIds):
            return EncodedPrompt(check_ids(prompt.token_ids, facts.vocab_size))
        check_fits(prompt, self._longest_context(model), facts.max_piece_bytes)
        give_up = self._clock() + self._patience_s
        while True:
            tokenizer = await self._wait_up(model, give_up - self._clock())
            try:
                return await tokenizer.encode(prompt, deadline - self._clock(), traceparent)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or self._clock() >= give_up:
                    raise request_error(error) from error
            # The session hears of the break, too, but perhaps a moment later.
            await asyncio.sleep(0.05)

    def _having(self, model: str) -> list[Tokenizer]:
        return [each for each in self if self._registry.has_model(each.address, model)]

    def _best(self, model: str) -> Tokenizer:
        """Of the model's tokenizers one that is there, if any is; raises NO_TOKENIZER."""
        having = self._having(model)
        if not having:
            raise _none_of(model)
        return min(having, key=lambda each: (not each.is_up, each.slots.num_slots))

    def _longest_context(self, model: str) -> int:
        usable = self._registry.usable(model)
        return max((worker.figures.max_model_len for worker in usable), default=0)

    async def _wait_up(self, model: str, timeout_s: float) -> Tokenizer:
        try:
            async with asyncio.timeout(max(timeout_s, 0)):
                while not (best := self._best(model)).is_up:
                    await self._news.wait()
        except TimeoutError:
            raise _none_of(model) from None
        return best

    def _on_change(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
        self._tell_change()

    def _introduce(
        self, tokenizer: Tokenizer, info: tokenizer_pb2.GetTokenizerInfoResponse
    ) -> None:
        changed = self._registry.tell_vocabulary(
            tokenizer.address, info.model, info.vocab_fingerprint
        )
        if changed:
            self._on_new_vocabulary(changed)
        for worker in self._registry:
            known = self._registry.vocabulary(worker.figures.model)
            if known is not None and known != worker.figures.vocab_fingerprint:
                theirs = worker.figures.vocab_fingerprint
                self._tell_mismatch(known, worker=theirs, worker_id=worker.worker_id)
        known = self._registry.vocabulary(info.model)
        if known is not None and known != info.vocab_fingerprint:
            self._tell_mismatch(info.vocab_fingerprint, other_tokenizers=known, model=info.model)

    def _tell_mismatch(self, tokenizer: str, **others: str) -> None:
        self._log.error("vocabulary_mismatch", tokenizer=tokenizer, **others)


def _none_of(model: str) -> RequestError:
    return RequestError(Reason.NO_TOKENIZER, f"no tokenizer of {model} is connected")
