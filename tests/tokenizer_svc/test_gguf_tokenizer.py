"""Tokenizers built from GGUF metadata split text as their models were trained."""

import json

import pytest
from tokenizers import Tokenizer

from noria.service.vocabulary import VocabularyError
from tests.support.chats import TEXTS
from tokenizer_svc.gguf_tokenizer import tokenizer_json_from_gguf

# No merges: every byte is a token, and what is shown is how text is split before merging.
METADATA = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["<|end|>", "<tool>", "[PAD]", *map(chr, range(33, 127)), "Ġ", "Ċ"],
    "tokenizer.ggml.token_type": [3, 4, 5, *[1] * 96],
    "tokenizer.ggml.merges": [],
}


def built(pre, **changes):
    metadata = METADATA | {"tokenizer.ggml.pre": pre} | changes
    return Tokenizer.from_str(json.dumps(tokenizer_json_from_gguf(metadata, "test")))


def split(tokenizer, text):
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", "ĠĠ", "Ġ123", "Ġdon", "'t", "Ċ"]),
        ("smollm", ["a", "ĠĠĠ", "1", "2", "3", "Ġdon", "'t", "Ċ"]),
        ("qwen2", ["a", "ĠĠ", "Ġ", "1", "2", "3", "Ġdon", "'t", "Ċ"]),
        ("llama-bpe", ["a", "ĠĠ", "Ġ", "123", "Ġdon", "'t", "Ċ"]),
    ],
)
def test_each_name_splits_in_its_own_way(pre, pieces):
    """Digits and the spaces before them are where the patterns differ."""
    assert split(built(pre), "a   123 don't\n") == pieces


def test_llama_takes_digits_by_three_and_whole_words_from_the_vocabulary():
    """`ignore_merges`: a word that is a token is taken as it is."""
    assert split(built("llama-bpe"), "12345") == ["123", "45"]
    tokens = [*METADATA["tokenizer.ggml.tokens"], "word"]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 4, 5, *[1] * 97]}
    assert built("llama-bpe", **changes).encode("word").tokens == ["word"]
    assert built("gpt-2", **changes).encode("word").tokens == list("word")


def test_unused_ids_are_no_tokens():
    """Filler of a padded vocabulary never comes out of text."""
    tokenizer = built("gpt-2")
    assert tokenizer.token_to_id("[PAD]") is None
    assert tokenizer.encode("[PAD]").tokens == list("[PAD]")
    assert tokenizer.token_to_id("<|end|>") == 0


def test_a_name_that_is_not_known_is_refused_with_those_that_are():
    """A wrong split would give wrong ids without anybody noticing."""
    with pytest.raises(VocabularyError, match=r"'tekken'; supported: gpt-2, llama-bpe, qwen2"):
        built("tekken")
    with pytest.raises(VocabularyError, match="None"):
        built(None)


@pytest.mark.model
def test_qwen2_gives_the_ids_of_transformers_own_tokenizer(demo_model_path):
    """With the demo model's vocabulary and merges, which serve any pattern."""
    from transformers import Qwen2Tokenizer

    from noria.service.gguf_file import read_gguf

    metadata = read_gguf(demo_model_path).metadata | {"tokenizer.ggml.pre": "qwen2"}
    definition = tokenizer_json_from_gguf(metadata, "test")
    merges = [tuple(merge) for merge in definition["model"]["merges"]]
    reference = Qwen2Tokenizer(vocab=definition["model"]["vocab"], merges=merges)
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    for text in TEXTS:
        assert tokenizer.encode(text).ids == reference.encode(text, add_special_tokens=False)
