"""What the parts find, a row each, and the table of all of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

OK, SKIPPED, FAILED = "ok", "skipped", "FAILED"


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was tried. Of `seconds`, how much was moved, computed and answered.

    `moved` in bytes, `computed` in floating-point operations, `tokens` in positions; 0: it is
    not what this row is about.
    """

    part: str
    name: str
    outcome: str = OK
    seconds: float = 0.0
    moved: float = 0.0
    computed: float = 0.0
    tokens: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device does at best, measured in the same run; 0: unknown."""

    bytes_per_s: float = 0.0
    flops: float = 0.0

    @classmethod
    def among(cls, rows: Iterable[Row]) -> "Ceilings":
        found = [r for r in rows if r.part == "ceilings" and r.seconds]
        moved = max((row.moved / row.seconds for row in found), default=0.0)
        return cls(moved, max((row.computed / row.seconds for row in found), default=0.0))


class Unfit(Exception):  # noqa: N818 - it is no error: the machine is too small
    """This cannot run here; the message says why, with both numbers."""


def attempt(part: str, name: str, run: Callable[[], Row]) -> Row:
    """What `run` finds, under this name; what it raises becomes a row too."""
    try:
        return replace(run(), part=part, name=name)
    except Unfit as unfit:
        return Row(part, name, SKIPPED, note=str(unfit))
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        return Row(part, name, FAILED, note=told[:200])


def line(row: Row, ceilings: Ceilings) -> str:
    """One row, as it is printed when it is there."""
    figures = (*_figures(row, ceilings), row.note) if row.outcome == OK else (row.outcome, row.note)
    told = "  ".join(figure for figure in figures if figure)
    return f"{row.part:<12} {row.name:<52} {told}".rstrip()


def table(rows: Iterable[Row]) -> str:
    """Markdown: one row each, with what part of the ceilings was reached."""
    rows = list(rows)
    ceilings = Ceilings.among(rows)
    told = ["| part | what | outcome | time | tokens/s | GB/s | TFLOP/s | note |", "|" + "---|" * 8]
    for row in rows:
        time, tokens, moved, computed = _figures(row, ceilings)
        cells = (row.part, row.name, row.outcome, time, tokens, moved, computed, row.note)
        told.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(told)


def _figures(row: Row, ceilings: Ceilings) -> tuple[str, str, str, str]:
    """Time, tokens/s, GB/s, TFLOP/s, as far as the row has them."""
    if not row.seconds:
        return "", "", "", ""
    moved, computed = row.moved / row.seconds, row.computed / row.seconds
    own = row.part == "ceilings"
    return (
        f"{row.seconds * 1e3:.3f} ms" if row.seconds < 1 else f"{row.seconds:.2f} s",
        f"{row.tokens / row.seconds:,.0f} tokens/s" if row.tokens else "",
        _rate(moved, 1e9, "GB/s", 0 if own else ceilings.bytes_per_s),
        _rate(computed, 1e12, "TFLOP/s", 0 if own else ceilings.flops),
    )


def _rate(rate: float, unit: float, name: str, ceiling: float) -> str:
    if not rate:
        return ""
    share = f" ({rate / ceiling:.0%})" if ceiling else ""
    return f"{rate / unit:.4g} {name}{share}"
