"""What a token's spelling in a vocabulary means in bytes."""

import re

# Beyond Latin-1, so that encoding a token that holds it fails.
_NO_LETTER = "\u0100"
# SentencePiece writes a space so (google/sentencepiece, README).
SPACE_LETTER = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_IMAGE_TOKENS = ("[multimodal]", "<start_of_image>", "<end_of_image>", "<image_soft_token>")


class _ByteLetters(dict[int, str]):
    """GPT-2's letter of each byte -> the byte as a Latin-1 character; see `token_bytes`."""

    def __init__(self) -> None:
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in plain]
        letters = [(b, b) for b in plain] + [(256 + i, b) for i, b in enumerate(others)]
        super().__init__((letter, chr(byte)) for letter, byte in letters)

    def __missing__(self, letter: int) -> str:
        return _NO_LETTER


_BYTE_OF_LETTER = _ByteLetters()


def token_bytes(token: str) -> bytes:
    """The bytes of a byte-level BPE token (openai/gpt-2, `bytes_to_unicode`).

    A token with a letter that stands for no byte means its own text, as in `tokenizers`.
    """
    try:
        return token.translate(_BYTE_OF_LETTER).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a SentencePiece token: `<0xE2>` is one byte, U+2581 a space."""
    if token.startswith("<0x") and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return token.replace(SPACE_LETTER, " ").encode()


def looks_special(token: str) -> bool:
    """Whether an added token is written like a control token (as llama.cpp's converter judges),
    or stands for an image, whose flag files of one model disagree about.
    """
    return (
        token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (token.startswith(("<|", "<｜")) and token.endswith(("|>", "｜>")))
        or (token.startswith("<unused") and token.endswith(">"))
        or stands_for_image(token)
    )


def stands_for_image(token: str) -> bool:
    """Whether this is a placeholder of Gemma's image input. A text model may lack its row."""
    return token in _IMAGE_TOKENS
