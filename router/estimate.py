"""The dry run: what would happen to a conversation now. Nothing is held once it is known."""

from dataclasses import dataclass, replace

from noria.reasons import RequestError
from router.chat import Call, Chats, allowed_tokens
from router.demand import attainable, check_price, generation_ask
from router.limit_decision import Ask
from router.policy import Need
from router.registry import ModelLimits
from router.requests import GenerationInput, check_min_tokens, check_prompt_logprobs


@dataclass(slots=True)
class Estimate:
    """Filled in as far as the request would come. Sizes are in tokens and KV blocks.

    `refusal` is why it would come no further. Without a worker that has room now,
    `worker_id` is empty and `kv_blocks` 0.
    """

    input_tokens: int = 0
    max_tokens: int = 0
    reserved_tokens: int = 0
    kv_blocks: int = 0
    queue_position: int = 0
    worker_id: str = ""
    routing_note: str = ""
    refusal: RequestError | None = None


async def estimate(chats: Chats, call: Call, chat: GenerationInput, result: Estimate) -> None:
    """Take the request's way up to its worker, and fill in `result`.

    Raises whatever would refuse it.
    """
    limits = chats.limits(call, chat)
    ask = attainable(generation_ask(chat, limits), chat, call.tenant.limits)
    with chats.place(call), chats.hold(call) as hold:
        # Of the limits a place for the encoding alone is taken, and comes back.
        await chats.limiter.take(hold, Ask(encodes=ask.encodes))
        prompt = await chats.encoded(call, chat, limits.model)
    result.input_tokens = len(prompt.token_ids)
    _price(result, chat, limits)
    check_price(result.reserved_tokens, call.tenant.limits)
    with chats.hold(call) as hold:
        tokens = result.reserved_tokens
        await chats.limiter.take(hold, replace(ask, needed=tokens, wanted=tokens, dry_run=True))
    chats.queue.check_tokens(result.input_tokens)
    result.queue_position = chats.queue.position_of_next(limits.model, chat.priority)
    _route(result, chats, limits.model, chat)


def _price(result: Estimate, chat: GenerationInput, limits: ModelLimits) -> None:
    result.max_tokens = allowed_tokens(chat.max_tokens, result.input_tokens, limits)
    check_min_tokens(chat.sampling.min_tokens, result.max_tokens)
    check_prompt_logprobs(chat.sampling.prompt_logprobs, result.input_tokens)
    result.reserved_tokens = result.input_tokens + chat.num_choices * result.max_tokens


def _route(result: Estimate, chats: Chats, model: str, chat: GenerationInput) -> None:
    need = Need(
        result.input_tokens,
        result.reserved_tokens,
        chat.num_choices,
        chat.priority,
        has_grammar=chat.sampling.grammar is not None,
    )
    choice = chats.dispatcher.preview(model, need)
    if choice is None:
        result.routing_note = "no worker has room now; it would wait"
        return
    result.worker_id, result.routing_note = choice.worker.worker_id, choice.note
    result.kv_blocks = choice.worker.figures.blocks_for(result.reserved_tokens)
