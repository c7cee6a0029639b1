"""What the service does with text, apart from the wire it comes over."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from noria.reasons import Reason, RequestError, invalid_field
from noria.service.limits import MAX_DECODE_IDS, MAX_MODEL_NAME_BYTES
from noria.service.vocabulary import Vocabulary
from tokenizer_svc.chat_encoder import ChatEncoder
from tokenizer_svc.chat_template import ChatTemplate
from tokenizer_svc.codec import TextCodec
from tokenizer_svc.detokenizer import UnknownTokenError, piece_of
from tokenizer_svc.loader import load_text_model


@dataclass(frozen=True)
class TextService:
    """One loaded model under the name that requests use. Safe to use from many threads."""

    name: str
    vocabulary: Vocabulary
    codec: TextCodec
    chat: ChatEncoder
    template_fingerprint: str

    def check_model(self, name: str) -> None:
        """Raises RequestError unless the name is empty or this model's.

        MODEL_NOT_FOUND, or INVALID_FIELD for one too long. A name that is not known is not
        repeated: it could be anything.
        """
        size = len(name.encode())
        if size > MAX_MODEL_NAME_BYTES:
            raise invalid_field("model", f"{size} bytes; at most {MAX_MODEL_NAME_BYTES}")
        if name not in ("", self.name):
            raise RequestError(Reason.MODEL_NOT_FOUND, f"model: not served here; {self.name!r} is")

    def decode(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes of each id. Raises RequestError (INVALID_FIELD)."""
        if len(token_ids) > MAX_DECODE_IDS:
            raise invalid_field("token_ids", f"{len(token_ids)} ids; at most {MAX_DECODE_IDS}")
        pieces = []
        for index, token_id in enumerate(token_ids):
            try:
                pieces.append(piece_of(self.vocabulary, token_id))
            except UnknownTokenError as error:
                raise invalid_field(f"token_ids[{index}]", str(error)) from None
        return pieces


def load_text_service(
    path: Path, name: str, now: Callable[[], datetime] = datetime.now
) -> TextService:
    """Load a model's text side. Raises ValueError for what is not supported, and OSError."""
    model = load_text_model(path)
    template = None
    if model.template is not None:
        template = ChatTemplate(model.template, model.named_tokens, now)
    source = model.template or ""
    return TextService(
        name=name,
        vocabulary=model.vocabulary,
        codec=model.codec,
        chat=ChatEncoder(model.codec, template),
        template_fingerprint=hashlib.sha256(source.encode()).hexdigest(),
    )
