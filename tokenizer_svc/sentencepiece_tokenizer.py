"""A tokenizer out of a GGUF file's metadata, for SentencePiece vocabularies with byte fallback."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers

from noria.service.token_bytes import SPACE_LETTER, looks_special
from noria.service.vocabulary import VocabularyError

# Longer ones take too long to be cut into all their pairs.
_MAX_TOKEN_LETTERS = 1024
_NORMAL, _USER_DEFINED, _BYTE = 1, 4, 6
# Files of these say nothing of a space before each text, and their models were trained
# without one; to llama.cpp silence means that there is one.
_UNPREFIXED = ("gemma",)


def sentencepiece_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """BPE by the tokens' scores. It knows no control token: none comes out of any text.

    Raises VocabularyError for a vocabulary without scores or without a token for each byte.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    scores: list[float] = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise VocabularyError(f"{source}: {len(tokens)} tokens but {len(scores)} scores")
    if kinds.count(_BYTE) != 256:
        raise VocabularyError(f"{source}: {kinds.count(_BYTE)} byte tokens; 256 are needed")
    spaces, ranked = _mergeable(tokens, kinds, scores)
    atoms = _atoms(tokens, kinds)
    single = {token: i for i, token in enumerate(tokens) if kinds[i] == _BYTE or token in atoms}
    vocab = single | spaces | ranked
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(spaces | ranked), byte_fallback=True)
    )
    tokenizer.normalizer = _normalizer(prefixed=_is_prefixed(metadata))
    # All of them are in the vocabulary: others would get ids of their own.
    tokenizer.add_tokens([AddedToken(a, normalized=False, special=False) for a in atoms])
    return tokenizer


def _is_space(token: str) -> bool:
    return not token.strip(f" {SPACE_LETTER}")


def _mergeable(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> tuple[dict[str, int], dict[str, int]]:
    """Runs of spaces, and the ordinary tokens, best score first: text -> id, in merge order.

    Runs are merged before all else: SentencePiece takes what is user-defined out of a text
    first. (As the published tokenizers of such models have it; from 32 spaces on they cut a
    run in other places than SentencePiece.)
    """
    runs = (i for i, kind in enumerate(kinds) if kind == _USER_DEFINED and _is_space(tokens[i]))
    normal = (i for i, kind in enumerate(kinds) if kind == _NORMAL)
    ordered = sorted(normal, key=lambda i: -scores[i])
    return (
        {tokens[i].replace(" ", SPACE_LETTER): i for i in runs},
        {tokens[i]: i for i in ordered},
    )


def _merges(ordered: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every pair of these tokens that makes one of them, in the order of what they make.

    Of pairs that make the same token the longest left part comes first, as in transformers.
    Raises ValueError for a token that is longer than any should be.
    """
    for token, token_id in ordered.items():
        if len(token) > _MAX_TOKEN_LETTERS:
            problem = f"{len(token)} letters; at most {_MAX_TOKEN_LETTERS}"
            raise ValueError(f"the token with id {token_id} has {problem}")
    return [
        (left, token[cut:])
        for token in ordered
        for cut in range(len(token) - 1, 0, -1)
        if (left := token[:cut]) in ordered and token[cut:] in ordered
    ]


def _atoms(tokens: Sequence[str], kinds: Sequence[int]) -> frozenset[str]:
    """User-defined tokens: found in the text as written, the longest first, and never split."""
    return frozenset(
        token
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == _USER_DEFINED and not _is_space(token) and not looks_special(token)
    )


def _normalizer(*, prefixed: bool) -> normalizers.Normalizer:
    """Spaces as SentencePiece writes them; `prefixed`: one more before each stretch of text."""
    replace = normalizers.Replace(" ", SPACE_LETTER)
    if not prefixed:
        return replace
    return normalizers.Sequence([normalizers.Prepend(SPACE_LETTER), replace])


def _is_prefixed(metadata: Mapping[str, Any]) -> bool:
    architecture = str(metadata.get("general.architecture"))
    return bool(
        metadata.get("tokenizer.ggml.add_space_prefix", not architecture.startswith(_UNPREFIXED))
    )
