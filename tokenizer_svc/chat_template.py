"""A model's chat template: sandboxed Jinja, set up as in transformers (`apply_chat_template`)."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from noria.reasons import Reason, RequestError


class TemplateInvalidError(ValueError):
    """The model's own template is not valid Jinja."""


# What a template raises itself, or what its operations raise on values that it did not expect.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
)


class _Refusal(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks training targets: only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares a set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """Renders conversations. Safe to use from many threads.

    `named_tokens` are visible to the template as `bos_token`, `eos_token` and so on; `now`
    is its clock. Raises TemplateInvalidError if `source` does not compile.
    """

    def __init__(
        self,
        source: str,
        named_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        self._source = source
        self._named_tokens = dict(named_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateInvalidError(f"the model's chat template: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """The conversation as one text.

        Raises RequestError (INVALID_FIELD, `messages`) for what the template cannot take; any
        other failure, of memory for example, as it is.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._named_tokens,
            )
        except _TEMPLATE_ERRORS as error:
            problem = f"the model's chat template refuses them{self._said(error)}"
            raise RequestError(
                Reason.INVALID_FIELD, f"messages: {problem}", fields=(("messages", problem),)
            ) from None

    def _said(self, error: Exception) -> str:
        """What the template says itself; any other text could hold the conversation's."""
        said = str(error)
        return f": {said}" if isinstance(error, _Refusal) and said in self._source else ""
