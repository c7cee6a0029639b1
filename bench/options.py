"""Kinds of options that the commands share."""

from typing import Any

import click

from bench.load.distributions import DistributionError, Lengths, parse_lengths


class _LengthsType(click.ParamType[Lengths]):
    name = "lengths"

    def convert(self, value: Any, param: Any, ctx: Any) -> Lengths:
        if isinstance(value, Lengths):
            return value
        try:
            return parse_lengths(value)
        except DistributionError as error:
            self.fail(str(error), param, ctx)


LENGTHS = _LengthsType()
