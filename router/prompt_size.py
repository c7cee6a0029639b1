"""Texts that cannot fit the context, told by their size before they are cut into ids."""

from noria.reasons import Reason, RequestError
from router.requests import Conversation, RawText


def check_fits(prompt: Conversation | RawText, max_model_len: int, max_piece_bytes: int) -> None:
    """Raises CONTEXT_LENGTH_EXCEEDED for more bytes than `max_model_len` tokens can spell.

    `max_piece_bytes` are the longest token's. Either may be 0, not known: nothing is refused.
    """
    limit = max_model_len * max_piece_bytes
    field = "text" if isinstance(prompt, RawText) else "messages"
    size = text_bytes(prompt)
    if limit and size > limit:
        problem = (
            f"{size} bytes of text; a context of {max_model_len} tokens of at most "
            f"{max_piece_bytes} bytes holds {limit}"
        )
        raise RequestError(
            Reason.CONTEXT_LENGTH_EXCEEDED, f"{field}: {problem}", fields=((field, problem),)
        )


def text_bytes(prompt: Conversation | RawText) -> int:
    """All of its texts, in bytes of UTF-8."""
    if isinstance(prompt, RawText):
        return len(prompt.text.encode())
    texts = [text for turn in prompt.turns for text in turn.texts]
    return sum(len(text.encode()) for text in (prompt.system or "", *texts))
