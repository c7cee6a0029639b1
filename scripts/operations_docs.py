"""Write the tables of docs/operations.md from the sources; with --check, say if they are stale.

A table stands between `<!-- NAME -->` and `<!-- end -->`; what is around it is written by hand.
"""

import asyncio
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from noria.cli.main import main as noria
from noria.service.metrics import LoopLag
from noria.service.tls_watch import expiry_gauge
from router.__main__ import main as router
from router.metrics import Load, RouterMetrics, RouterState
from tokenizer_svc.__main__ import main as tokenizer
from tokenizer_svc.metrics import TokenizerMetrics
from worker.__main__ import main as worker
from worker.metrics import WorkerMetrics, WorkerState

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operations.md"
COMMANDS = {
    "router": ("NORIA_ROUTER", router),
    "tokenizer": ("NORIA_TOKENIZER", tokenizer),
    "worker": ("NORIA_WORKER", worker),
    "noria up": ("NORIA_UP", noria.commands["up"]),
    "noria plan": ("NORIA_PLAN", noria.commands["plan"]),
}


class _Expiry(Collector):
    def collect(self) -> Iterator[Metric]:
        yield expiry_gauge({"server": 0.0})


# One value of each label, so that families read from live objects show their labels.
_ROUTER = RouterState(held={"": 0}, workers={"": 0}, demand={"m": Load()}, capacity={"m": Load()})
_WORKER = WorkerState(about=(("model", ""), ("attention_backend", ""), ("dtype", "")))
REGISTERED: dict[str, Callable[[CollectorRegistry], object]] = {
    "every service": LoopLag,
    "router": lambda registry: RouterMetrics(registry, lambda: _ROUTER),
    "tokenizer": lambda registry: TokenizerMetrics(registry, lambda: 0),
    "worker": lambda registry: WorkerMetrics(registry, lambda: _WORKER),
    "every service with TLS": lambda registry: registry.register(_Expiry()),
}


def variable(prefix: str, option: click.Option) -> str:
    """The environment variable that click reads for an option."""
    if isinstance(option.envvar, str):
        return option.envvar
    return f"{prefix}_{str(option.name).upper()}"


def flags_table(prefix: str, command: click.Command) -> Iterator[str]:
    """A row for each flag."""
    yield "| flag | environment | default | meaning |"
    yield "|---|---|---|---|"
    for option in command.params:
        if isinstance(option, click.Option):
            flag = " ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
            row = (flag, f"`{variable(prefix, option)}`", _default(option), option.help or "")
            yield f"| {' | '.join(row)} |"


def _default(option: click.Option) -> str:
    if option.required:
        return "required"
    value = option.to_info_dict()["default"]
    if value is None or value == "" or value == () or "UNSET" in repr(value).upper():
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def metrics_table() -> Iterator[str]:
    """A row for each metric of each service."""
    yield "| metric | of | kind | labels | meaning |"
    yield "|---|---|---|---|---|"
    for service, register in REGISTERED.items():
        for family in asyncio.run(families(register)):
            name = f"`{full_name(family)}`"
            labels = ", ".join(f"`{label}`" for label in _labels(family))
            yield f"| {name} | {service} | {_kind(family)} | {labels} | {family.documentation} |"


async def families(register: Callable[[CollectorRegistry], object]) -> list[Metric]:
    """What a service registers; there is a loop for what is read on one."""
    registry = CollectorRegistry()
    register(registry)
    # The first reading names the models, whose series then exist.
    list(registry.collect())
    return list(registry.collect())


def full_name(family: Metric) -> str:
    """The name under which it is scraped; a histogram's without its suffixes."""
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    return family.name + suffix


def _kind(family: Metric) -> str:
    return "gauge" if family.type == "info" else str(family.type)


def _labels(family: Metric) -> Iterable[str]:
    labels = {label for sample in family.samples for label in sample.labels}
    return sorted(labels - {"le"})


def page() -> str:
    """The page with its tables as they should be."""
    tables = {f"flags of {name}": flags_table(*about) for name, about in COMMANDS.items()}
    tables["metrics"] = metrics_table()
    text = PAGE.read_text()
    for name, rows in tables.items():
        begin, end = f"<!-- {name} -->", "<!-- end -->"
        block = re.compile(rf"{re.escape(begin)}\n.*?{end}", re.DOTALL)
        if not block.search(text):
            raise SystemExit(f"{PAGE.name} has no place for the table {begin}")
        made = "\n".join((begin, *rows, end))
        text = block.sub(lambda found, made=made: made, text)
    return text


def main() -> None:
    """Write the page, or with --check exit 1 if it would change."""
    fresh = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(fresh)
    elif fresh != PAGE.read_text():
        raise SystemExit("docs/operations.md is stale; run `make docs`")


if __name__ == "__main__":
    main()
