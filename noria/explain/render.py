"""A story on a terminal of 80 columns, or in a file."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from noria.explain.steps import Stage, Step, Token, runs_of
from noria.explain.story import Story
from noria.explain.times import Pace, Times, tenths
from noria.explain.words import (
    counted,
    duration,
    percent,
    positions,
    probability,
    token_text,
)

# Of a run of steps of one kind, what is shown unless all of it is asked for.
_FIRST, _LAST = 5, 3
_BAR = 20
_MAX_WIDTH = 100
_STAGES = {Stage.PREFILL: "prefill", Stage.AGAIN: "recompute", Stage.DECODE: "decode"}


def show(story: Story, console: Console, *, all_steps: bool = False) -> None:
    """Print a story; with `all_steps` none of its steps is left out."""
    console.print(picture(story, all_steps=all_steps), width=min(console.width, _MAX_WIDTH))


def picture(story: Story, *, all_steps: bool = False) -> RenderableType:
    """The tables and sentences of a story."""
    name = story.request_id or "that no router took"
    parts: list[RenderableType] = [_heading(f"The life of request {name}"), _life(story)]
    if story.steps:
        parts += [_heading("Step by step, in the engine"), _steps(story, all_steps=all_steps)]
    if story.has_timeline:
        wait = duration(story.times.wall_us)
        parts += [_heading(f"Where the time went: {wait} from the question to the end")]
        parts += [_times(story.times), Text("\n".join(_pace(story.pace)))]
    parts.append(Padding(Text(story.verdict.sentence, style="bold"), (1, 0, 0, 0)))
    return Group(*parts)


def _heading(text: str) -> RenderableType:
    return Padding(Text(text, style="bold"), (1, 0, 0, 0))


def _table(*columns: tuple[str, bool]) -> Table:
    """A table with these headers; the marked columns hold numbers."""
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for header, is_number in columns:
        table.add_column(header, justify="right" if is_number else "left", no_wrap=is_number)
    return table


def _life(story: Story) -> RenderableType:
    table = _table(("what", False), ("where", False), ("at that moment", False), ("took", True))
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    table.columns[2].overflow = "fold"
    table.columns[2].ratio = 1
    for row in story.life:
        took = "" if row.took_us is None else duration(row.took_us)
        table.add_row(row.what, row.where, Text(row.told), took)
    return table


def _steps(story: Story, *, all_steps: bool) -> RenderableType:
    table = _table(
        ("step", False), ("position computed", False), ("token chosen", False), ("prob.", True),
        ("KV after", True), ("batch", True), ("seen at", True),
    )  # fmt: skip
    table.columns[0].no_wrap = True
    for run in runs_of(story.steps):
        elided = [] if all_steps else run[_FIRST : len(run) - _LAST]
        # One row left out would be replaced by one row.
        shown = run if len(elided) < 2 else run[:_FIRST]
        for step in shown:
            _add_step(table, story, step, all_steps=all_steps)
        if shown is not run:
            table.add_row("...", _left_out(elided), "", "", "", "", "")
            for step in run[-_LAST:]:
                _add_step(table, story, step, all_steps=all_steps)
    return table


def _add_step(table: Table, story: Story, step: Step, *, all_steps: bool) -> None:
    record, chosen = step.record, step.chosen
    is_eos = story.ended_with_eos and step is story.steps[-1]
    spelled = "-" if chosen is None else "EOS" if is_eos else token_text(chosen)
    table.add_row(
        f"{_STAGES[step.stage]} {step.number or ''}".rstrip(),
        Text(_computed(step)),
        Text(spelled),
        probability(chosen.probability) if chosen else "",
        f"{record.kv_tokens:,}",
        str(record.batch_size),
        duration(step.at_us),
    )
    if all_steps:
        for other in record.runners_up:
            text = Text(f"  not {token_text(Token(other.id, other.bytes))}", style="dim")
            table.add_row("", "", text, Text(probability(other.probability), style="dim"))


def _computed(step: Step) -> str:
    record = step.record
    if step.stage is Stage.DECODE:
        fed = f" {token_text(step.token_in)}" if step.token_in else ""
        return f"{record.first_position}{fed}"
    shape = f"[{record.num_positions}, {record.hidden_size}]"
    return f"{positions(record.first_position, step.last_position)} {shape}"


def _left_out(steps: Sequence[Step]) -> str:
    computed = positions(steps[0].record.first_position, steps[-1].last_position)
    return f"{computed} in {counted(len(steps), 'step')}"


def _times(times: Times) -> RenderableType:
    table = _table(("", False), ("", False), ("ms", True), ("", True))
    figures = list(times.stretches.values())
    for (name, us), shown in zip(times.stretches.items(), tenths(figures), strict=True):
        share = us / max(1, times.wall_us)
        if us:
            table.add_row(
                name, Text(_bar(share), style="cyan"), f"{shown / 10:,.1f}", percent(share)
            )
    table.add_section()
    table.add_row("your wait", "", f"{round(times.wall_us / 100) / 10:,.1f}", "100 %")
    return table


def _bar(share: float) -> str:
    length = share * _BAR
    return "█" * round(length) or ("▏" if share else "")


def _pace(pace: Pace) -> Iterator[str]:
    if pace.first_us is None:
        yield "No text came."
        return
    yield f"Time to the first token (TTFT): {duration(pace.first_us)}."
    if pace.between_us:
        yield (
            f"After it {pace.tokens_per_second:.1f} tokens/s: one every "
            f"{duration(pace.between_us)} on average (inter-token latency), "
            f"the longest pause {duration(pace.longest_us)}."
        )
