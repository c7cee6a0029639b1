"""The life of one request between its checks and its end.

A place in the queue, the conversation's ids, a decode slot, a worker: each is held by a
context manager, so that there is one way out, whoever leaves by it.
"""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from noria.reasons import Reason, RequestError
from router.answer import Answer
from router.auth import Tenant
from router.choice_answer import AnswerHead
from router.decode_slot import DecodeSlot, SlotOptions, SlotPort
from router.delivery import Delivery
from router.demand import attainable, check_price, counting_ask, generation_ask
from router.dispatch import Dispatcher
from router.interrupt import Interrupt
from router.ledger.ledger import UsageLedger
from router.limit_book import Hold
from router.limiter import Limiter
from router.queue import Permit, RequestQueue
from router.record import RequestRecord
from router.registry import ModelLimits, Registry
from router.requests import (
    EncodedPrompt,
    Generation,
    GenerationInput,
    Prompt,
    check_min_tokens,
    check_prompt_logprobs,
)
from router.token_stream import TokenStream


class TextSide(Protocol):
    """Turns prompts of a model into ids, and ids into text; `deadline` is on the router's clock."""

    async def encode(
        self, model: str, prompt: Prompt, deadline: float, traceparent: str
    ) -> EncodedPrompt: ...

    def slots(self, model: str) -> SlotPort: ...


@dataclass(frozen=True, slots=True)
class Call:
    """One client's call: who, until when, and how it is answered, told about and ended."""

    tenant: Tenant
    deadline: float
    traceparent: str
    record: RequestRecord
    delivery: Delivery
    interrupt: Interrupt


@dataclass(frozen=True, slots=True)
class Chats:
    """Answers conversations and continues raw prompts.

    `seed_source` gives a seed to a request that names none.

    `cache_secret` salts cached prefixes: routers that share it share what workers cached.
    """

    text: TextSide
    registry: Registry
    queue: RequestQueue[TokenStream]
    limiter: Limiter
    dispatcher: Dispatcher
    seed_source: Callable[[], int]
    cache_secret: bytes
    ledger: UsageLedger

    @contextlib.asynccontextmanager
    async def answering(self, call: Call, chat: GenerationInput) -> AsyncIterator[Delivery]:
        """The answer's events, from the first to the last, for as long as the block lasts.

        Raises every refusal before that as RequestError.
        """
        with contextlib.ExitStack() as held:
            limits = self.limits(call, chat)
            permit = held.enter_context(self.place(call))
            ask = attainable(generation_ask(chat, limits), chat, call.tenant.limits)
            hold = held.enter_context(self.hold(call))
            await self.limiter.take(hold, ask)
            prompt = await self.encoded(call, chat, limits.model)
            hold.encoded()
            port = self.text.slots(limits.model)
            generation = self._generation(call, chat, limits, prompt)
            check_price(generation.price, call.tenant.limits)
            await self.limiter.fit(hold, generation.price)
            head = AnswerHead(
                call.record.request_id,
                limits.model,
                prompt.token_ids,
                chat.stop_sequences,
                tells_prompt=chat.sampling.prompt_logprobs is not None,
            )
            answer = Answer(
                head, call.record, call.delivery, call.interrupt.set, generation.num_choices
            )
            options = _slot_options(chat, prompt)
            slots = [
                held.enter_context(DecodeSlot(options, choice, port)) for choice in answer.choices
            ]
            stream = TokenStream(generation, permit, answer, self.dispatcher)
            answer.bind(slots, stream)
            self.ledger.open(call.record)
            held.enter_context(stream)
            yield call.delivery

    async def count(self, call: Call, chat: GenerationInput) -> int:
        """The prompt's tokens as the model would see them. Raises like `answering`."""
        limits = self.limits(call, chat)
        with self.place(call), self.hold(call) as hold:
            await self.limiter.take(hold, counting_ask(chat.prompt))
            return len((await self.encoded(call, chat, limits.model)).token_ids)

    def place(self, call: Call) -> Permit[TokenStream]:
        """A place in the queue. Raises QUEUE_FULL, QUEUE_SHARE."""
        return self.queue.permit(call.tenant.name, call.tenant.limits.queue_share)

    def hold(self, call: Call) -> Hold:
        """What the call will hold of its tenant's limits, nothing so far."""
        return self.limiter.hold(call.tenant, lambda: call.record.used_tokens)

    def limits(self, call: Call, chat: GenerationInput) -> ModelLimits:
        """Raises what `Registry.limits` does."""
        limits = self.registry.limits(chat.model, call.tenant.models)
        call.record.model = limits.model
        return limits

    async def encoded(self, call: Call, chat: GenerationInput, model: str) -> EncodedPrompt:
        """The prompt's ids for a model. Raises what the text side does."""
        call.record.encoding()
        prompt = await self.text.encode(model, chat.prompt, call.deadline, call.traceparent)
        call.record.encoded(len(prompt.token_ids), prompt.duration_us)
        return prompt

    def _generation(
        self, call: Call, chat: GenerationInput, limits: ModelLimits, prompt: EncodedPrompt
    ) -> Generation:
        max_tokens = allowed_tokens(chat.max_tokens, len(prompt.token_ids), limits)
        check_min_tokens(chat.sampling.min_tokens, max_tokens)
        check_prompt_logprobs(chat.sampling.prompt_logprobs, len(prompt.token_ids))
        seed = self.seed_source() if chat.seed is None else chat.seed
        call.record.seed = seed
        return Generation(
            request_id=call.record.request_id,
            model=limits.model,
            prompt_token_ids=prompt.token_ids,
            sampling=chat.sampling,
            seed=seed,
            max_tokens=max_tokens,
            priority=chat.priority,
            deadline=call.deadline,
            trace_steps=chat.trace_steps,
            traceparent=call.traceparent,
            cache_salt=call.tenant.cache_salt(self.cache_secret),
            num_choices=chat.num_choices,
        )


def allowed_tokens(asked: int | None, prompt_tokens: int, limits: ModelLimits) -> int:
    """How many tokens may be put out: what was asked, or the default capped by the room.

    Raises CONTEXT_LENGTH_EXCEEDED naming prompt, output and context length.
    """
    room = limits.max_model_len - prompt_tokens
    wanted = 1 if asked is None else asked
    if wanted > room:
        problem = (
            f"{prompt_tokens} prompt tokens and {wanted} output tokens; "
            f"together at most {limits.max_model_len}"
        )
        raise RequestError(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            f"max_tokens: {problem}",
            fields=(("max_tokens", problem),),
        )
    return asked or min(limits.default_max_tokens or room, room)


def _slot_options(chat: GenerationInput, prompt: EncodedPrompt) -> SlotOptions:
    return SlotOptions(
        stop_sequences=chat.stop_sequences,
        min_tokens=chat.sampling.min_tokens,
        skip_special_tokens=chat.skip_special_tokens,
        prompt_tail_ids=prompt.token_ids,
        starts_in_thinking=prompt.starts_in_thinking,
    )
