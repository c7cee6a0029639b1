"""Templates run sandboxed, as transformers would run them, and never fail as a defect."""

from datetime import datetime

import pytest

from noria.reasons import Reason, RequestError
from tokenizer_svc.chat_template import ChatTemplate, TemplateInvalidError

USER = [{"role": "user", "content": "hi"}]


def render(source, messages=USER, *, add_generation_prompt=True, **named):
    template = ChatTemplate(source, named, now=lambda: datetime(2030, 2, 3))
    return template.render(messages, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}{{ messages[0].role }}", "<s>hiuser"),
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),
        ("{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{{ {'b': '<é>', 'a': [1]} | tojson }}", '{"b": "<é>", "a": [1]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "03 Feb 2030"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{{ tools is none }}{{ tools is defined }}{{ add_generation_prompt }}", "TrueTrueTrue"),
        ("{{ undefined_name }}{{ messages[0].nothing }}", ""),
    ],
)
def test_templates_have_what_transformers_gives_them(source, text):
    """Block trimming, loop controls, filters, the clock and the named tokens."""
    assert render(source, bos_token="<s>") == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('Roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ 1 // 0 }}",
        "{{ range(1000000) | list }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_whatever_a_template_raises_is_the_messages_fault(source):
    """INVALID_FIELD on `messages`, never INTERNAL, and nothing that leaves the sandbox."""
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.reason is Reason.INVALID_FIELD
    assert caught.value.fields[0][0] == "messages"


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", RecursionError),
        ("{{ strftime_now('') }}", OSError),
    ],
)
def test_what_no_message_could_help_is_not_called_the_messages_fault(source, kind):
    """The call fails as internal, and the operator hears of it."""

    def broken_clock():
        raise OSError("no clock")

    with pytest.raises(kind):
        ChatTemplate(source, {}, broken_clock).render([], add_generation_prompt=False)


def test_the_templates_own_words_are_passed_on_but_never_the_conversations():
    """An error helps the caller and repeats no prompt."""
    with pytest.raises(RequestError, match="refuses them: Roles must alternate"):
        render("{{ raise_exception('Roles must alternate') }}")
    with pytest.raises(RequestError) as caught:
        render("{{ raise_exception('bad: ' + messages[0].content) }}", [{"content": "SECRET"}])
    assert "SECRET" not in caught.value.message


def test_what_a_message_says_is_never_run():
    """Content that looks like a template is rendered as it stands."""
    content = "{{ 7*7 }}{% for i in range(99999) %}x{% endfor %}{% raw %}"
    assert render("{{ messages[0].content }}", [{"content": content}]) == content


def test_a_template_that_does_not_compile_is_found_when_the_model_is_loaded():
    """Not by the first request."""
    with pytest.raises(TemplateInvalidError, match="chat template"):
        render("{% if %}")
