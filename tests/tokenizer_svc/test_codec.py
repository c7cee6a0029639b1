"""Encoding from many threads, and control tokens in raw prompts."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.chats import TEXTS
from tokenizer_svc.loader import load_text_model


@pytest.fixture(scope="module")
def codec(golden_model):
    return load_text_model(golden_model).codec


def test_many_threads_get_what_one_gets(codec):
    """TOK-01: nothing is borrowed, changed or mixed up between concurrent calls."""
    texts = [text + "<|user|>" + text for text in TEXTS]
    alone = [codec.encode(text) for text in texts]
    calls = [i % len(texts) for i in range(4000)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda i: codec.encode(texts[i]), calls))
    assert together == [alone[i] for i in calls]


def test_raw_prompts_may_write_control_tokens(codec):
    """They are the caller's own template, so their control tokens count."""
    assert codec.encode_raw("<|user|>네<|/user|>", add_special_tokens=True) == [7, 4512, 8]


def test_text_between_control_tokens_is_cleaned_apart(codec):
    """What cleaning takes out never joins two halves of a control token."""
    assert 7 not in codec.encode("<|us#er|>", lambda run: run.replace("#", ""))


def test_empty_text_has_no_ids(codec):
    """Nothing is made up."""
    assert codec.encode_raw("", add_special_tokens=True) == []
