"""The text side of a model, from a folder."""

import json
import re
import shutil

import pytest

from noria.service.vocabulary import VocabularyError
from tokenizer_svc.loader import load_text_model


@pytest.fixture
def folder(golden_model, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(golden_model / name, tmp_path / name)
    return tmp_path


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_template_file_comes_before_the_config_field(folder):
    """As in transformers."""
    assert "assistant" in load_text_model(folder).template
    (folder / "chat_template.jinja").write_text("{{ 'file' }}")
    assert load_text_model(folder).template == "{{ 'file' }}"


def test_of_several_templates_the_default_is_taken(folder):
    """Others are for uses that name them."""
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    change(folder / "tokenizer_config.json", chat_template=named)
    assert load_text_model(folder).template == "d"
    change(folder / "tokenizer_config.json", chat_template=named[:1])
    assert load_text_model(folder).template is None


def test_named_tokens_may_be_written_as_objects(folder):
    """Older files keep the token's flags with it."""
    change(folder / "tokenizer_config.json", bos_token={"content": "<|system|>", "lstrip": False})
    named = load_text_model(folder).named_tokens
    assert named == {"bos_token": "<|system|>", "eos_token": "<|/assistant|>"}


def test_what_the_post_processor_adds_is_for_raw_prompts_alone(folder):
    """TOK-04: a template writes its own BOS; it must not come twice."""
    bos, text = {"SpecialToken": {"id": "B", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    processor = {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"B": {"id": "B", "ids": [5], "tokens": ["<|system|>"]}},
    }
    change(folder / "tokenizer.json", post_processor=processor)
    codec = load_text_model(folder).codec
    assert codec.encode_raw("네", add_special_tokens=True) == [5, 4512]
    assert codec.encode_raw("네", add_special_tokens=False) == codec.encode("네") == [4512]


def test_truncation_and_padding_of_the_file_are_not_applied(folder):
    """A prompt is encoded whole, whatever the file was once trained with."""
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    change(folder / "tokenizer.json", truncation=cut)
    assert len(load_text_model(folder).codec.encode("abcdef")) == 6


def test_a_space_before_the_first_word_alone(folder):
    """Metaspace `first`: none after a control token, as in `tokenizers`."""
    vocab = {"▁": 0, "a": 1, "<s>": 2}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    scheme = {"replacement": "▁", "prepend_scheme": "first", "split": False}
    definition = {
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "pre_tokenizer": {"type": "Metaspace", **scheme},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "added_tokens": [{"id": 2, "content": "<s>", "special": True, **flags}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    for name in ("tokenizer_config.json", "config.json"):
        (folder / name).write_text("{}")
    codec = load_text_model(folder).codec
    assert codec.encode("a<s>a") == [0, 1, 2, 1]
    assert codec.encode("<s>a<s>a") == [2, 1, 2, 1]


@pytest.mark.parametrize(
    ("file", "fields", "problem"),
    [
        ("tokenizer.json", {"pre_tokenizer": {"type": "None such"}}, "library refuses it"),
        ("tokenizer_config.json", {"bos_token": {"text": "x"}}, "malformed: KeyError"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat template is no text"),
        ("tokenizer_config.json", {"chat_template": [5]}, "malformed: TypeError"),
    ],
)
def test_malformed_files_are_refused_with_their_folder(folder, file, fields, problem):
    """In one line that an operator can use."""
    change(folder / file, **fields)
    with pytest.raises(VocabularyError, match=rf"^{re.escape(str(folder))}.*{problem}"):
        load_text_model(folder)


def test_other_tokenizers_are_refused_by_name(folder):
    """Nothing is served that would give wrong ids."""
    change(folder / "tokenizer.json", decoder={"type": "WordPiece"})
    with pytest.raises(VocabularyError, match="WordPiece"):
        load_text_model(folder)
