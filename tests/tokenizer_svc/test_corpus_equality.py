"""Ids of both real models' tokenizers on 2,000 lines in ten scripts equal transformers'."""

import pytest

from noria.service.vocabulary import load_vocabulary
from tests.support.corpus import SCRIPTS, corpus_lines
from tokenizer_svc.text_service import load_text_service

LINES = corpus_lines(2000)


def reference_of(path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def different(text, reference):
    """Lines whose ids differ, BOS included."""
    return [
        line
        for line in LINES
        if text.codec.encode_raw(line, add_special_tokens=True) != reference.encode(line)
    ]


def check_bytes(text):
    """Every line comes back from its ids, byte for byte, control tokens included."""
    for line in LINES:
        ids = text.codec.encode(line)
        assert b"".join(text.decode(ids)).decode() == line


def test_the_corpus_is_what_it_says():
    """2,000 different lines, the same each time, and every script in many of them."""
    assert len(set(LINES)) == 2000
    assert corpus_lines(2000) == LINES != corpus_lines(2000, seed=2)
    for words in SCRIPTS.values():
        used = [line for line in LINES if any(word in line for word in words.split(" "))]
        assert len(used) > 100


@pytest.mark.model
def test_smollm2(demo_model_path):
    """transformers leaves out that SmolLM2 splits digits first, as its published
    tokenizer.json does and llama.cpp too: without it only lines with numbers differ.
    """
    from tokenizers import pre_tokenizers

    text, reference = load_text_service(demo_model_path, "m"), reference_of(demo_model_path)
    as_converted = different(text, reference)
    assert as_converted
    assert all(any(letter.isnumeric() for letter in line) for line in as_converted)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    assert different(text, reference) == []
    check_bytes(text)


@pytest.mark.model
@pytest.mark.soak
def test_gemma(gemma_model_path, tmp_path):
    """Also from the Hugging Face files that transformers writes of it, with one fingerprint."""
    text, reference = load_text_service(gemma_model_path, "m"), reference_of(gemma_model_path)
    assert different(text, reference) == []
    check_bytes(text)
    # Runs of more than 31 spaces, which SentencePiece itself would cut elsewhere.
    for line in (" " * 40 + "x", "x" + " " * 33 + "y", "\n" * 40, "\t" * 70):
        assert text.codec.encode_raw(line, add_special_tokens=True) == reference.encode(line)
    reference.save_pretrained(tmp_path)
    saved = load_text_service(tmp_path, "m")
    assert saved.vocabulary.fingerprint == load_vocabulary(gemma_model_path).fingerprint
    assert different(saved, reference) == []
