"""Chat templates for files that bring none, known by the control tokens of their vocabulary."""

from noria.service.vocabulary import Vocabulary

# Gemma's turns: no system role (its text opens the first turn), user and model in turn.
_GEMMA = """
{{- bos_token -}}
{%- set system = messages[0].content ~ '\\n\\n' if messages[0].role == 'system' else '' -%}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages -%}
{%- if not turns -%}
  {{- raise_exception('a message of the user is needed besides the system text') -}}
{%- endif -%}
{%- for turn in turns -%}
  {%- if turn.role != ('user' if loop.index0 is even else 'assistant') -%}
    {{- raise_exception('user and assistant must alternate, the user first') -}}
  {%- endif -%}
  {{- '<start_of_turn>' ~ ('user' if turn.role == 'user' else 'model') ~ '\\n' -}}
  {{- (system if loop.first else '') ~ turn.content | trim ~ '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""
_BY_CONTROL_TOKENS = (((b"<start_of_turn>", b"<end_of_turn>"), _GEMMA),)


def template_for(vocabulary: Vocabulary) -> str | None:
    """The template whose control tokens the vocabulary has; None if none is known."""
    pairs = zip(vocabulary.pieces, vocabulary.is_special, strict=True)
    special = {piece for piece, is_special in pairs if is_special}
    for needed, template in _BY_CONTROL_TOKENS:
        if special.issuperset(needed):
            return template
    return None
