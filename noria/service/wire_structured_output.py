"""A `StructuredOutput` as plain data and back: the kind is the name of its field."""

from collections.abc import Sequence

from noria.service.structured_output import (
    StructuredOutputError,
    check_choices,
    check_regex,
    parse_json_schema,
)
from noria.v1 import common_pb2


def checked_structured_output(output: common_pb2.StructuredOutput) -> tuple[str, tuple[str, ...]]:
    """The kind and its texts: the schema, the expression, the choices; none of any object.

    Raises StructuredOutputError for the first fault.
    """
    kind = output.WhichOneof("grammar")
    match kind:
        case "json_schema":
            parse_json_schema(output.json_schema)
            return kind, (output.json_schema,)
        case "json_object" if output.json_object:
            return kind, ()
        case "json_object":
            raise StructuredOutputError(kind, "false asks for nothing; leave it out")
        case "regex":
            check_regex(output.regex)
            return kind, (output.regex,)
        case "choice":
            check_choices(output.choice.choices)
            return kind, tuple(output.choice.choices)
        case _:
            raise StructuredOutputError("grammar", "none; one of its fields is needed")


def structured_output(kind: str, texts: Sequence[str]) -> common_pb2.StructuredOutput:
    """The message for what `checked_structured_output` gave."""
    match kind:
        case "json_schema":
            return common_pb2.StructuredOutput(json_schema=texts[0])
        case "regex":
            return common_pb2.StructuredOutput(regex=texts[0])
        case "choice":
            choices = common_pb2.SamplingParams.Choices(choices=texts)
            return common_pb2.StructuredOutput(choice=choices)
        case _:
            return common_pb2.StructuredOutput(json_object=True)
