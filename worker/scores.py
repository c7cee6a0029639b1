"""How likely the tokens of a prompt are after what precedes each: what is asked and answered."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from worker.sequence import Draw, SampledToken, ScheduledSequence, SchedulerOutput


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Those of consecutive prompt tokens, in columns: there may be thousands.

    Natural logarithms under the model. Of each token its own, and how many of the
    alternatives (likeliest first, the token itself left out) are its.
    """

    logprobs: Ids[float]
    num_alternatives: Ids[int]
    alternative_ids: Ids[int]
    alternative_logprobs: Ids[float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner made of a step, by sequence ids.

    `tokens` has every sequence with a draw and `prompt_logprobs` every one with a scoring,
    except those whose logits are no numbers.
    """

    tokens: Mapping[int, SampledToken] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, PromptLogprobs] = field(default_factory=dict)

    def collect(self) -> "StepResult":
        """Itself: of a step that is computed there is nothing to wait for."""
        return self


def unanswered(
    output: SchedulerOutput, result: StepResult
) -> Iterator[tuple[ScheduledSequence, str, str]]:
    """What the result lacks, with the reason and, where that lies in its request, the field."""
    for entry in output.scheduled:
        drawn = entry.draw is None or entry.sequence_id in result.tokens
        scored = entry.scoring is None or entry.sequence_id in result.prompt_logprobs
        if not (drawn and scored):
            yield entry, *_reason(entry.draw)


def _reason(draw: Draw | None) -> tuple[str, str]:
    if draw is not None and draw.sampling.grammar is not None and draw.matcher is not None:
        field, problem = draw.sampling.grammar.field, draw.matcher.problem
        if problem:
            return f"{field}: {problem}", field
    return "the logits were no numbers", ""
