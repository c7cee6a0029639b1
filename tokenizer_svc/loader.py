"""Loads a model's text side: its tokenizer, vocabulary and chat template."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from noria.service.gguf_file import read_gguf
from noria.service.vocabulary import (
    Vocabulary,
    VocabularyError,
    load_vocabulary,
    read_json,
    refusing_malformed,
    vocabulary_from_gguf,
)
from tokenizer_svc.codec import TextCodec
from tokenizer_svc.control_tokens import ControlToken, ControlTokens
from tokenizer_svc.gguf_tokenizer import pre_tokenizer_named, tokenizer_json_from_gguf
from tokenizer_svc.sentencepiece_tokenizer import sentencepiece_from_gguf
from tokenizer_svc.turn_templates import template_for

# A tokenizer that leaves control tokens alone, and what finds them.
Encoder = tuple[Tokenizer, ControlTokens]

# Names that templates know the control tokens by -> GGUF's names.
_NAMED_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # spelled so in GGUF
    "cls_token": "cls",
    "mask_token": "mask",
}


@dataclass(frozen=True)
class TextModel:
    """What the service knows of a model. `template` is None if the model has none and its
    control tokens tell none.

    `named_tokens` are the texts that a template sees as `bos_token`, `eos_token`, ...
    """

    codec: TextCodec
    vocabulary: Vocabulary
    template: str | None
    named_tokens: Mapping[str, str]


def load_text_model(path: Path) -> TextModel:
    """Load from a `.gguf` file or a Hugging Face folder.

    Raises VocabularyError or GGUFError for what is not supported or damaged, by name, and
    OSError.
    """
    with refusing_malformed(str(path)):
        model = _from_folder(path) if path.is_dir() else _from_gguf(path)
        if model.template is None:
            model = replace(model, template=template_for(model.vocabulary))
    if not isinstance(model.template, str | None):
        raise VocabularyError(f"{path}: the chat template is no text")
    return model


def _from_gguf(path: Path) -> TextModel:
    metadata, source = read_gguf(path).metadata, str(path)
    vocabulary = vocabulary_from_gguf(metadata, source)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    ids = {n: metadata.get(f"tokenizer.ggml.{g}_token_id") for n, g in _NAMED_TOKENS.items()}
    named = {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}
    bos, eos = ids["bos_token"], ids["eos_token"]
    for name, token_id in (("bos", bos), ("eos", eos)):
        if token_id is not None and not 0 <= token_id < len(tokens):
            problem = f"{name}_token_id is {token_id} in a vocabulary of {len(tokens)} ids"
            raise VocabularyError(f"{path}: {problem}")
    encode, adds_bos = _gguf_encoder(metadata, vocabulary, source)
    codec = TextCodec(
        *encode,
        [bos] if bos is not None and _says(metadata, "add_bos_token", adds_bos) else [],
        [eos] if eos is not None and _says(metadata, "add_eos_token", False) else [],
    )
    return TextModel(codec, vocabulary, metadata.get("tokenizer.chat_template"), named)


def _gguf_encoder(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, source: str
) -> tuple[Encoder, bool]:
    """How the file's model encodes, and whether it adds a BOS where the file does not say."""
    if metadata["tokenizer.ggml.model"] == "llama":
        tokens = metadata["tokenizer.ggml.tokens"]
        special = [i for i, is_special in enumerate(vocabulary.is_special) if is_special]
        control = ControlTokens(ControlToken(tokens[i], i) for i in special)
        return (sentencepiece_from_gguf(metadata, source), control), True
    pre = pre_tokenizer_named(metadata.get("tokenizer.ggml.pre"), source)
    definition = tokenizer_json_from_gguf(metadata, source)
    return _encoder(source, definition, vocabulary), pre.add_bos


def _says(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.{key}", default))


def _from_folder(folder: Path) -> TextModel:
    vocabulary = load_vocabulary(folder)
    path = folder / "tokenizer.json"
    definition = read_json(path)
    config = read_json(folder / "tokenizer_config.json")
    named = {name: _token_text(config[name]) for name in _NAMED_TOKENS if config.get(name)}
    tokenizer, control = _encoder(str(path), definition, vocabulary)
    later = _without_first_space(definition)
    codec = TextCodec(
        tokenizer,
        control,
        *_wrapping_ids(tokenizer),
        later=None if later is None else _encoder(str(path), later, vocabulary)[0],
    )
    return TextModel(codec, vocabulary, _folder_template(folder, config), named)


def _without_first_space(definition: Mapping[str, Any]) -> dict[str, Any] | None:
    """The definition for what is not at the beginning of a text; None if that is the same."""
    pre = definition.get("pre_tokenizer") or {}
    if pre.get("type") != "Metaspace" or pre.get("prepend_scheme") != "first":
        return None
    return {**definition, "pre_tokenizer": {**pre, "prepend_scheme": "never"}}


def _token_text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """`chat_template.jinja`, or else the (default) template of tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


def _wrapping_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer's post-processor puts before and after a text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    num_before = next(
        (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), len(whole)
    )
    return whole[:num_before], whole[num_before + len(plain) :]


def _tokenizer(definition: Mapping[str, Any], source: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(json.dumps(definition))
    except Exception as error:  # the library raises no narrower class
        raise VocabularyError(f"{source}: the tokenizers library refuses it: {error}") from error


def _encoder(source: str, definition: dict[str, Any], vocabulary: Vocabulary) -> Encoder:
    added = [
        token | {"special": vocabulary.is_special[token["id"]]}
        for token in definition.get("added_tokens", [])
        if token["id"] < len(vocabulary)
    ]
    control = [
        ControlToken(t["content"], t["id"], t["lstrip"], t["rstrip"], t["single_word"])
        for t in added
        if t["special"]
    ]
    whole = definition | {"added_tokens": added, "truncation": None, "padding": None}
    tokenizer = _tokenizer(whole, source)
    tokenizer.encode_special_tokens = True
    return tokenizer, ControlTokens(control)
