"""Small vocabularies for tests: id = place in the list."""

from typing import Any

from noria.service.vocabulary import Vocabulary


def vocabulary_of(*pieces: str | bytes, special: tuple[str, ...] = ()) -> Vocabulary:
    """A vocabulary of these pieces, of which those in `special` are control tokens."""
    encoded = tuple(p.encode() if isinstance(p, str) else p for p in pieces)
    return Vocabulary(encoded, tuple(p in special for p in pieces), ())


def bytes_vocabulary() -> Vocabulary:
    """Every byte at its own value, then `<|end|>` (256), the only control token."""
    return vocabulary_of(*(bytes([b]) for b in range(256)), "<|end|>", special=("<|end|>",))


CONTROL, USER_DEFINED, BYTE = 3, 4, 6


def sentencepiece_metadata(
    *pieces: str, control: tuple[str, ...] = (), user_defined: tuple[str, ...] = (), **more: Any
) -> dict[str, Any]:
    """A GGUF file's metadata: `<unk>`, control tokens (BOS, EOS, ...), user-defined ones, a
    token for each byte, then `pieces`, the best score first.
    """
    heads = ["<unk>", *control, *user_defined, *(f"<0x{b:02X}>" for b in range(256))]
    kinds = [2, *[CONTROL] * len(control), *[USER_DEFINED] * len(user_defined), *[BYTE] * 256]
    scores = [-float(i) for i in range(len(pieces))]
    fields = {
        "model": "llama",
        "tokens": [*heads, *pieces],
        "token_type": [*kinds, *[1] * len(pieces)],
        "scores": [*[-1000.0] * len(heads), *scores],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": False,
        **more,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in fields.items() if v is not None}
