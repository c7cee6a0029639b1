"""The same ids as transformers for ordinary conversations, with two models."""

import pytest

from tests.support.chats import some_chats
from tokenizer_svc.chat_encoder import ChatMessage
from tokenizer_svc.text_service import load_text_service


def check_equal(text, reference, chats):
    for chat in chats:
        continued = chat[-1]["role"] == "assistant"
        expected = reference.apply_chat_template(
            chat,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=not continued,
            continue_final_message=continued,
        )
        ids = text.chat.encode([ChatMessage(m["role"], m["content"]) for m in chat])
        assert ids == expected, chat


def test_golden_ids_equal_those_of_transformers(golden_model):
    """A tokenizer.json with its template, 250 chats."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(golden_model)
    check_equal(load_text_service(golden_model, "m"), reference, some_chats(250))


@pytest.mark.model
def test_gguf_ids_equal_those_of_transformers(demo_model_path, tmp_path):
    """A tokenizer built from GGUF metadata, 250 chats; and both read one vocabulary.

    transformers leaves out of a GGUF file that SmolLM2 splits digits before all else (its
    published tokenizer.json does, and so does llama.cpp), so the reference is told.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    from noria.service.vocabulary import load_vocabulary

    reference = AutoTokenizer.from_pretrained(
        demo_model_path.parent, gguf_file=demo_model_path.name
    )
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    check_equal(load_text_service(demo_model_path, "m"), reference, some_chats(250))
    reference.save_pretrained(tmp_path)
    saved = load_text_service(tmp_path, "m")
    check_equal(saved, reference, some_chats(20, seed=8))
    assert saved.vocabulary.fingerprint == load_vocabulary(demo_model_path).fingerprint
