"""What each token id means in bytes, read alike from a GGUF file or a Hugging Face folder.

Worker and tokenizer compare the fingerprints of what they loaded, so both read it here,
with neither torch nor a tokenizer library.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from noria.service.gguf_file import read_gguf
from noria.service.token_bytes import (
    SPACE_LETTER,
    looks_special,
    sentencepiece_bytes,
    stands_for_image,
    token_bytes,
)

# GGUF token types (llama.cpp, `llama_token_type`).
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
# `tokenizer.ggml.model` -> what a token's spelling means.
_SPELLINGS: dict[str, Callable[[str], bytes]] = {
    "gpt2": token_bytes,
    "llama": sentencepiece_bytes,
}
# Control tokens that end a turn; files of chat models often name another EOS alone, and
# llama.cpp knows these by their text, too.
_ENDS_OF_TURN = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>")
# The largest vocabularies have about a million ids; beyond this it is damage.
MAX_IDS = 1 << 22
_MAX_TOLD = 200


class VocabularyError(ValueError):
    """The model's vocabulary cannot be read; the message names the file and the reason."""


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokens by id. An id without a token is a hole: b"" and not special.

    `is_special` marks control tokens: those flagged so, and added tokens that are written
    like one (`<|...|>`), since GGUF files keep no other trace of the flag.
    """

    pieces: tuple[bytes, ...]
    is_special: tuple[bool, ...]
    eos_token_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.pieces)

    @cached_property
    def max_piece_bytes(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.pieces), default=0)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over `id TAB hex(bytes) TAB is_special LF` of every id in order, in hex."""
        lines = (
            f"{i}\t{piece.hex()}\t{special:d}\n"
            for i, (piece, special) in enumerate(zip(self.pieces, self.is_special, strict=True))
        )
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def load_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary of a `.gguf` file or of a folder with a `tokenizer.json`.

    Raises VocabularyError for a kind that is not supported, by name, or for a damaged file;
    GGUFError, OSError.
    """
    if path.is_dir():
        return _from_folder(path)
    return vocabulary_from_gguf(read_gguf(path).metadata, str(path))


@contextlib.contextmanager
def refusing_malformed(source: str) -> Iterator[None]:
    """Raises VocabularyError, naming `source`, where a value in it has not the form expected."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, UnicodeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise VocabularyError(f"{source}: malformed: {what[:_MAX_TOLD]}") from error


def vocabulary_from_gguf(metadata: Mapping[str, Any], source: str) -> Vocabulary:
    """The vocabulary in a GGUF file's metadata. Raises VocabularyError naming `source`."""
    with refusing_malformed(source):
        return _from_metadata(metadata, source)


def _from_metadata(metadata: Mapping[str, Any], source: str) -> Vocabulary:
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model not in _SPELLINGS:
        known = " and ".join(map(repr, _SPELLINGS))
        raise VocabularyError(f"{source}: tokenizer.ggml.model {model!r:.80}; supported: {known}")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list):
        raise VocabularyError(f"{source}: tokenizer.ggml.tokens is no list")
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise VocabularyError(f"{source}: {len(tokens)} tokens but {len(kinds)} token types")
    spelled = _SPELLINGS[model]
    pieces = [
        _gguf_piece(token, kind, spelled) if kind != 1 else spelled(token)
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    special = [
        kind in (_UNKNOWN, _CONTROL) or (kind == _USER_DEFINED and looks_special(token))
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    names = ("eos", "eot", "eom")
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    ends = [i for i, kind in enumerate(kinds) if kind == _CONTROL and tokens[i] in _ENDS_OF_TURN]
    return _vocabulary(pieces, special, [*eos, *ends], source)


def _gguf_piece(token: str, kind: int, spelled: Callable[[str], bytes]) -> bytes:
    if kind == _UNUSED:
        return b""
    return token.encode() if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) else spelled(token)


def _vocabulary(
    pieces: Iterable[bytes], special: Iterable[bool], eos: Iterable[int | None], source: str
) -> Vocabulary:
    ids = tuple(dict.fromkeys(i for i in eos if i is not None))
    vocabulary = Vocabulary(tuple(pieces), tuple(special), ids)
    if not vocabulary.pieces:
        raise VocabularyError(f"{source}: a vocabulary without tokens")
    for i in ids:
        if type(i) is not int or not 0 <= i < len(vocabulary):
            raise VocabularyError(
                f"{source}: EOS id {i!r:.40} in a vocabulary of {len(vocabulary)} ids"
            )
    return vocabulary


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is none. Raises VocabularyError, OSError."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise VocabularyError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise VocabularyError(f"{path}: not a JSON object")
    return content


def _from_folder(folder: Path) -> Vocabulary:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise VocabularyError(f"{folder}: no tokenizer.json")
    tokenizer = read_json(path)
    config = read_json(folder / "config.json")
    spelled = spelling_of(tokenizer, str(path))
    with refusing_malformed(str(path)):
        return _from_definition(folder, tokenizer, config, spelled)


def _from_definition(
    folder: Path,
    tokenizer: Mapping[str, Any],
    config: Mapping[str, Any],
    spelled: Callable[[str], bytes],
) -> Vocabulary:
    path = folder / "tokenizer.json"
    rows = _checked_id(config.get("vocab_size", 0), folder / "config.json", "vocab_size")
    added = {token["id"]: token for token in tokenizer.get("added_tokens", [])}
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    if rows and any(stands_for_image(token["content"]) for token in added.values()):
        vocab = {t: i for t, i in vocab.items() if i < rows or not stands_for_image(t)}
        added = {i: t for i, t in added.items() if i < rows or not stands_for_image(t["content"])}
    ids = (_checked_id(i, path, "id") for i in (*vocab.values(), *added))
    size = max(rows, *(i + 1 for i in ids), 0)
    pieces, special = [b""] * size, [False] * size
    for token, i in vocab.items():
        pieces[i] = spelled(token)
    for i, entry in added.items():
        text = entry["content"]
        special[i] = bool(entry["special"]) or looks_special(text)
        # A run of spaces is spelled like any other token; there is no other such spelling.
        pieces[i] = text.encode() if text.strip(SPACE_LETTER) else spelled(text)
    return _vocabulary(pieces, special, _eos_ids(folder, config, vocab, added), str(path))


def _checked_id(value: Any, path: Path, name: str) -> int:
    if type(value) is not int or not 0 <= value < MAX_IDS:
        raise VocabularyError(f"{path}: {name} is {value!r:.40}; from 0 to {MAX_IDS - 1}")
    return value


def spelling_of(tokenizer: Mapping[str, Any], source: str) -> Callable[[str], bytes]:
    """How the tokens of a `tokenizer.json` are spelled, by its decoder.

    Raises VocabularyError unless it describes byte-level BPE, or BPE of SentencePiece.
    """
    with refusing_malformed(source):
        model = (tokenizer.get("model") or {}).get("type")
        decoder = tokenizer.get("decoder") or {}
        steps = [step["type"] for step in decoder.get("decoders", [decoder]) if step]
    if model == "BPE" and steps == ["ByteLevel"]:
        return token_bytes
    if model == "BPE" and steps[:3] == ["Replace", "ByteFallback", "Fuse"]:
        return sentencepiece_bytes
    raise VocabularyError(
        f"{source}: model {model!r} with decoder {steps}; byte-level BPE and BPE of"
        " SentencePiece with byte fallback are supported"
    )


def _eos_ids(
    folder: Path,
    config: Mapping[str, Any],
    vocab: Mapping[str, int],
    added: Mapping[int, Mapping[str, Any]],
) -> list[int]:
    """EOS ids of generation_config.json, or else config.json; then the tokenizer's own."""
    generation = read_json(folder / "generation_config.json")
    configured = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = list(configured) if isinstance(configured, list) else [configured]
    token = read_json(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    by_text = dict(vocab) | {entry["content"]: i for i, entry in added.items()}
    return [i for i in (*ids, by_text.get(text) if text else None) if i is not None]
