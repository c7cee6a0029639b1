"""A `tokenizer.json` out of a GGUF file's metadata, for byte-level BPE vocabularies."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from noria.service.vocabulary import VocabularyError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

# The splitting patterns are the models' own (their published `tokenizer.json`).
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


@dataclass(frozen=True)
class PreTokenizer:
    """What `tokenizer.ggml.pre` stands for. `add_bos` counts where the file does not say."""

    steps: tuple[Mapping[str, Any], ...]
    normalizer: Mapping[str, Any] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


_PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((_byte_level(use_regex=True),)),
    "smollm": PreTokenizer(
        ({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))
    ),
    "qwen2": PreTokenizer(
        (_split(_QWEN2_PATTERN), _byte_level(use_regex=False)), normalizer={"type": "NFC"}
    ),
    "llama-bpe": PreTokenizer(
        (_split(_LLAMA3_PATTERN), _byte_level(use_regex=False)), ignore_merges=True, add_bos=True
    ),
}


def pre_tokenizer_named(name: Any, source: str) -> PreTokenizer:
    """The pre-tokenizer of that name. Raises VocabularyError naming what is known."""
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise VocabularyError(f"{source}: tokenizer.ggml.pre {name!r}; supported: {known}")
    return _PRE_TOKENIZERS[name]


def tokenizer_json_from_gguf(metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The `tokenizer.json` object of a byte-level BPE model. Raises VocabularyError."""
    pre = pre_tokenizer_named(metadata.get("tokenizer.ggml.pre"), source)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, kinds),
        "normalizer": pre.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.steps)},
        "post_processor": None,
        "decoder": _byte_level(use_regex=False),
        "model": _bpe(tokens, kinds, metadata.get("tokenizer.ggml.merges", []), pre),
    }


def _added_tokens(tokens: list[str], kinds: list[int]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": token, **flags, "special": kind != _USER_DEFINED}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _bpe(
    tokens: list[str], kinds: list[int], merges: list[str], pre: PreTokenizer
) -> dict[str, Any]:
    vocab = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != _UNUSED
    }
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre.ignore_merges,
        "vocab": vocab,
        "merges": [merge.split(" ", 1) for merge in merges],
    }
