"""How likely the tokens of a prompt are after what precedes each: what is asked and answered."""

from collections.abc import Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from worker.sequence import SampledToken


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
