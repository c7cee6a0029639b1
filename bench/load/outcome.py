"""What became of one request, as its client saw it."""

from dataclasses import dataclass, field

SERVED = "SERVED"
CANCELLED = "CANCELLED"
# A stream that ended without saying so.
BROKEN = "BROKEN"


@dataclass(slots=True)
class Outcome:
    """Times are seconds on the generator's clock; token counts are the server's own.

    `planned_at` is when the request was due, `sent_at` when it left. `message_times` has the
    arrival of every message with text. `ended` is SERVED, CANCELLED by this client, or the
    server's reason. `fault` says how a served stream was not what had been asked for.
    """

    index: int
    planned_at: float
    sent_at: float = 0.0
    ended_at: float = 0.0
    message_times: list[float] = field(default_factory=list)
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ended: str = ""
    fault: str = ""

    @property
    def is_served(self) -> bool:
        return self.ended == SERVED

    @property
    def is_sound(self) -> bool:
        """Whether it was served just as asked: only then do its times mean anything."""
        return self.is_served and not self.fault

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from when the request was due; None if no text came."""
        return self.message_times[0] - self.planned_at if self.message_times else None

    @property
    def inter_token_s(self) -> float | None:
        """Mean time from one token to the next; None with fewer than two."""
        if self.output_tokens < 2 or not self.message_times:
            return None
        return (self.message_times[-1] - self.message_times[0]) / (self.output_tokens - 1)

    @property
    def end_to_end_s(self) -> float:
        return self.ended_at - self.planned_at

    def check(self, asked_tokens: int, *, stopped_at_limit: bool) -> None:
        """Note how a served stream differs from what was asked: that many tokens, no fewer."""
        if self.output_tokens != asked_tokens:
            self.fault = f"{self.output_tokens} tokens for {asked_tokens} asked"
        elif not stopped_at_limit:
            self.fault = "it did not end by max_tokens"
        elif not self.message_times:
            self.fault = "no text"
