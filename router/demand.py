"""What a request will take of its tenant's limits, as far as that is known before it is ids."""

from noria.reasons import Reason, RequestError
from router.limit_decision import Ask
from router.prompt_size import text_bytes
from router.registry import ModelLimits
from router.requests import Conversation, GenerationInput, Prompt, RawIds
from router.tenant_limits import TenantLimits

# No text is worth less than a token for so many bytes; most are worth less than one for 3.
_MOST_BYTES_PER_TOKEN = 8
_USUAL_BYTES_PER_TOKEN = 3
# Of a chat template, for each turn.
_USUAL_TOKENS_PER_TURN = 16


def generation_ask(chat: GenerationInput, limits: ModelLimits) -> Ask:
    """Of an answer. Its tokens: at least those that it surely needs, at best a usual price.

    The usual price spares most requests a second look at the limits once theirs is known.
    """
    least, usual = _prompt_tokens(chat.prompt)
    default = limits.default_max_tokens or limits.max_model_len
    room = max(1, limits.max_model_len - usual)
    output = min(default, room) if chat.max_tokens is None else chat.max_tokens
    needed = least + chat.num_choices * (chat.max_tokens or 1)
    return Ask(
        requests=1,
        concurrent=chat.num_choices,
        encodes=encodes_of(chat.prompt),
        needed=needed,
        wanted=max(needed, usual + chat.num_choices * output),
    )


def encodes_of(prompt: Prompt) -> int:
    """Ids are not encoded."""
    return 0 if isinstance(prompt, RawIds) else 1


def counting_ask(prompt: Prompt) -> Ask:
    """Of counting a prompt's tokens, which uses none."""
    return Ask(requests=1, concurrent=1, encodes=encodes_of(prompt))


def attainable(ask: Ask, chat: GenerationInput, limits: TenantLimits) -> Ask:
    """The ask, which may pass some day. Raises LIMIT_UNATTAINABLE otherwise."""
    _check("n", chat.num_choices, "concurrent_requests", limits.concurrent_requests)
    sure = chat.num_choices * (chat.max_tokens or 1)
    if isinstance(chat.prompt, RawIds):
        sure += len(chat.prompt.token_ids)
    check_price(sure, limits)
    bound = limits.tokens_per_minute
    if bound is None or ask.needed <= bound:
        return ask
    # A text of few tokens for its bytes: what it needs is known once it is encoded.
    return Ask(ask.requests, ask.concurrent, ask.encodes, bound, bound)


def check_price(price: int, limits: TenantLimits) -> None:
    """Raises LIMIT_UNATTAINABLE for more tokens than a full bucket holds."""
    _check("max_tokens", price, "tokens_per_minute", limits.tokens_per_minute)


def _check(field: str, needed: int, name: str, bound: int | None) -> None:
    if bound is not None and needed > bound:
        what = "tokens with the prompt" if field == "max_tokens" else "choices"
        problem = f"{needed} {what}; {name} allows {bound} at once, however long it waits"
        raise RequestError(
            Reason.LIMIT_UNATTAINABLE, f"{field}: {problem}", fields=((field, problem),)
        )


def _prompt_tokens(prompt: Prompt) -> tuple[int, int]:
    """At least, and usually."""
    if isinstance(prompt, RawIds):
        return len(prompt.token_ids), len(prompt.token_ids)
    size = text_bytes(prompt)
    turns = 1 + len(prompt.turns) if isinstance(prompt, Conversation) else 0
    usual = size // _USUAL_BYTES_PER_TOKEN + turns * _USUAL_TOKENS_PER_TURN
    return size // _MOST_BYTES_PER_TOKEN, usual
