"""Text into token ids. Only the control tokens of trusted text become control tokens."""

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from tokenizer_svc.control_tokens import ControlTokens


class TextCodec:
    """Encodes text. Safe to use from many threads: nothing is changed after construction.

    `tokenizer` must leave control tokens alone (`encode_special_tokens`), so that none can
    come out of ordinary text; `control_tokens` finds them in text that may hold them.
    `prefix_ids` and `suffix_ids` are what the model's tokenizer puts around raw text.
    `later` is the tokenizer for what stands behind a control token, where it differs.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        control_tokens: ControlTokens,
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        later: Tokenizer | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._later = later or tokenizer
        self.control_tokens = control_tokens
        self._control_ids = control_tokens.token_ids
        self._prefix_ids = list(prefix_ids)
        self._suffix_ids = list(suffix_ids)

    def encode(self, text: str, clean: Callable[[str], str] = str) -> list[int]:
        """Ids of text whose control tokens count; `clean` is applied to each run between them."""
        ids: list[int] = []
        tokenizer = self._tokenizer
        for part in self.control_tokens.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self._encode_ordinary(tokenizer, clean(part)))
            tokenizer = self._later
        return ids

    def encode_raw(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a raw prompt, which may write control tokens itself."""
        ids = self.encode(text)
        return [*self._prefix_ids, *ids, *self._suffix_ids] if add_special_tokens else ids

    def _encode_ordinary(self, tokenizer: Tokenizer, text: str) -> list[int]:
        # A batch of one: `encode` alone would keep the interpreter's lock all the while.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        if not self._control_ids.isdisjoint(ids):
            raise RuntimeError("the tokenizer made a control token out of ordinary text")
        return ids
