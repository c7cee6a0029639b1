"""What one request's log line tells: outcome, counts, times. No text, no ids, no key."""

from collections.abc import Callable
from dataclasses import dataclass, field

from noria.reasons import Reason


@dataclass(slots=True)
class RequestRecord:
    """Filled in as the request goes on. Times are on the router's clock, in seconds."""

    request_id: str
    clock: Callable[[], float]
    accepted_at: float = field(init=False)
    encoded_at: float | None = None
    placed_at: float | None = None
    first_text_at: float | None = None
    tenant: str = ""
    model: str = ""
    worker_id: str = ""
    attempts: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    reason: Reason | None = None

    def __post_init__(self) -> None:
        self.accepted_at = self.clock()

    def encoded(self, model: str, input_tokens: int) -> None:
        self.encoded_at = self.clock()
        self.model, self.input_tokens = model, input_tokens

    def placed(self, worker_id: str) -> None:
        self.placed_at = self.clock()
        self.worker_id = worker_id
        self.attempts += 1

    def delivered_text(self) -> None:
        if self.first_text_at is None:
            self.first_text_at = self.clock()

    def fields(self) -> dict[str, object]:
        """The log line's fields; a time that never came is absent. Milliseconds."""
        milestones = {
            "encoded_ms": self.encoded_at,
            "placed_ms": self.placed_at,
            "first_text_ms": self.first_text_at,
            "total_ms": self.clock(),
        }
        return {
            "request_id": self.request_id,
            "outcome": "SERVED" if self.reason is None else self.reason.value,
            "tenant": self.tenant,
            "model": self.model,
            "worker_id": self.worker_id,
            "attempts": self.attempts,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            **{
                name: round((at - self.accepted_at) * 1000, 3)
                for name, at in milestones.items()
                if at is not None
            },
        }
