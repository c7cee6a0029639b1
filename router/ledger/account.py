"""What one request costs, gathered from all of its attempts until nothing more can come."""

from collections.abc import Callable
from dataclasses import dataclass, field

from router.worker_news import Work


@dataclass(slots=True)
class RequestAccount:
    """Settled once the request has ended and no worker holds an attempt of it.

    Work is counted whether or not the request still wanted it. `unconfirmed_tokens` came from
    attempts whose worker was lost: nobody else has counted them. A prompt that several attempts
    computed counts once, with what was cached of it the last time.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    unconfirmed_tokens: int = 0
    device_us: int = 0
    lost_attempts: int = 0
    _open_attempts: int = 0
    _ended: bool = False
    _settled: list[Callable[[], None]] = field(default_factory=list)

    @property
    def is_settled(self) -> bool:
        return self._ended and not self._open_attempts

    def when_settled(self, act: Callable[[], None]) -> None:
        """Call `act` once, when the account is settled; before it is."""
        self._settled.append(act)

    def attempt_begun(self) -> None:
        """A worker was given the request."""
        self._open_attempts += 1

    def attempt_ended(self, work: Work) -> None:
        """The worker's last entry for an attempt."""
        if work.prompt_tokens:
            self.prompt_tokens, self.cached_tokens = work.prompt_tokens, work.cached_tokens
        self.generated_tokens += work.generated_tokens
        self.device_us += work.device_us
        self._end_attempt()

    def attempt_lost(self, prompt_tokens: int, cached_tokens: int, received_tokens: int) -> None:
        """The session ended with an attempt; all that is known is what was received of it."""
        self.lost_attempts += 1
        if received_tokens:
            self.prompt_tokens, self.cached_tokens = prompt_tokens, cached_tokens
        self.generated_tokens += received_tokens
        self.unconfirmed_tokens += received_tokens
        self._end_attempt()

    def end(self) -> None:
        """The request is over; its record says how. Idempotent."""
        if not self._ended:
            self._ended = True
            self._settle()

    def _end_attempt(self) -> None:
        self._open_attempts -= 1
        self._settle()

    def _settle(self) -> None:
        if self.is_settled:
            acts, self._settled = self._settled, []
            for act in acts:
                act()
