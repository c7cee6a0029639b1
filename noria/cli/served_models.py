"""Which models are served under which names."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from noria.cli.model_source import ModelSource


class NamesError(ValueError):
    """Names that cannot be served; the message names the flag."""


@dataclass(frozen=True)
class ServedModel:
    """A model's file or folder, its name, and its further names."""

    path: Path
    name: str
    aliases: tuple[str, ...] = ()


def served_models(
    sources: Sequence[ModelSource], names: Sequence[str], aliases: Sequence[str]
) -> tuple[ServedModel, ...]:
    """The models under the given names, or under their own; `aliases` are `ALIAS=NAME`.

    Raises NamesError.
    """
    if names and len(names) != len(sources):
        raise NamesError(f"--served-model-name: {len(names)} names for {len(sources)} models")
    given = names or [source.name for source in sources]
    models = {
        name: ServedModel(source.path, name) for source, name in zip(sources, given, strict=True)
    }
    if len(models) < len(sources):
        twice = next(name for name in given if list(given).count(name) > 1)
        raise NamesError(f"two models are named {twice!r}; give --served-model-name for each")
    taken = set(models)
    for alias, name in map(_alias, aliases):
        if name not in models:
            known = ", ".join(models)
            raise NamesError(f"--alias {alias}={name}: no such model; served: {known}")
        if alias in taken:
            raise NamesError(f"--alias {alias}={name}: {alias!r} is a name already")
        taken.add(alias)
        models[name] = replace(models[name], aliases=(*models[name].aliases, alias))
    return tuple(models.values())


def own_names(sources: Sequence[ModelSource]) -> tuple[ServedModel, ...]:
    """The models under their own names. Raises NamesError for two of one name."""
    return served_models(sources, (), ())


def _alias(text: str) -> tuple[str, str]:
    alias, equals, name = text.partition("=")
    if not (alias and equals and name):
        raise NamesError(f"--alias {text}: ALIAS=NAME is needed")
    return alias, name
