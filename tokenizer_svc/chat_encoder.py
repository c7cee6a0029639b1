"""Conversations into ids: template, then tokens, with all that users write staying text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from noria.reasons import Reason, RequestError, invalid_field
from tokenizer_svc.chat_template import ChatTemplate
from tokenizer_svc.codec import TextCodec

ASSISTANT = "assistant"
# Unicode keeps these out of text that is interchanged (The Unicode Standard, section 23.7).
NONCHARACTERS = (
    *map(chr, range(0xFDD0, 0xFDF0)),
    *(chr(0x10000 * plane + end) for plane in range(17) for end in (0xFFFE, 0xFFFF)),
)


@dataclass(frozen=True)
class ChatMessage:
    """One turn; its blocks already joined into one text."""

    role: str
    content: str


def marks_for(texts: Iterable[str]) -> tuple[str, str]:
    """Two letters that none of the texts holds.

    Raises RequestError (INVALID_FIELD) for texts that leave no two noncharacters free.
    """
    written = list(texts)
    free = (mark for mark in NONCHARACTERS if not any(mark in text for text in written))
    first, second = next(free, None), next(free, None)
    if first is None or second is None:
        raise invalid_field(
            "messages",
            f"they hold more than {len(NONCHARACTERS) - 2} of Unicode's {len(NONCHARACTERS)}"
            " noncharacters, and two are needed here",
        )
    return first, second


class ChatEncoder:
    """Encodes conversations as the model's template writes them."""

    def __init__(self, codec: TextCodec, template: ChatTemplate | None) -> None:
        self._codec = codec
        self._template = template

    def encode(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The prompt's ids. A last message of the assistant is continued, any other answered.

        Control tokens come from the template alone: before rendering, a mark goes into each
        one that a message writes, begins or ends, and the marks leave once the text is split
        at the control tokens that remain. Raises RequestError (INVALID_FIELD, UNSUPPORTED).
        """
        if self._template is None:
            raise RequestError(
                Reason.UNSUPPORTED,
                "the model has no chat template; send a raw prompt to Completion instead",
            )
        mark, end_mark = marks_for(message.content for message in messages)
        turns = [
            {"role": m.role, "content": self._codec.control_tokens.neutralise(m.content, mark)}
            for m in messages
        ]
        if turns and turns[-1]["role"] == ASSISTANT:
            text = _continued(self._template, turns, end_mark)
        else:
            text = self._template.render(turns, add_generation_prompt=True)
        return self._codec.encode(text, lambda run: run.replace(mark, ""))


def _continued(template: ChatTemplate, turns: list[dict[str, str]], end_mark: str) -> str:
    """The text up to the end of the last message.

    The space after the mark tells whether the template trims messages; if it does, spaces
    before the mark would have gone too (as in transformers' `continue_final_message`).
    """
    last = turns[-1] | {"content": turns[-1]["content"] + end_mark + " "}
    text = template.render([*turns[:-1], last], add_generation_prompt=False)
    end = text.rfind(end_mark)
    if end < 0:
        field = f"messages[{len(turns) - 1}]"
        raise invalid_field(field, "the model's chat template cannot continue this message")
    preserved = text.startswith(" ", end + len(end_mark))
    return text[:end] if preserved else text[:end].rstrip()
