"""The workers this router is connected to, and what each holds.

Load is pushed by the workers and corrected by what was submitted after the number that
a report includes. Every attempt stays in `WorkerState.attempts` until its terminal
entry or the end of the session, also when its request is long gone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from noria.reasons import Reason, RequestError, invalid_field
from router.requests import Generation
from router.token_stream import Finish, NewTokens, Refusal, TokenStream


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """What a worker says of itself when a session begins. Sizes are in tokens and blocks."""

    instance_id: str
    model: str
    aliases: tuple[str, ...]
    vocab_fingerprint: str
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    default_max_tokens: int

    @property
    def look_ahead(self) -> int:
        """Sequences that may wait at the worker, so that a freed place never idles a step."""
        return max(1, self.max_num_seqs // 16)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a worker held at `received_at` (router's clock)."""

    received_at: float
    last_submit_number: int
    running: int
    waiting: int
    waiting_tokens: int
    free_blocks: int
    draining: bool


class WorkerLine(Protocol):
    """Carries submits and aborts to a worker, in order, without blocking."""

    def submit(self, generation: Generation, attempt: int, submit_number: int) -> None: ...

    def abort(self, submit_number: int) -> None: ...


@dataclass(slots=True)
class Attempt:
    """What was submitted under one number. `stream` is None once nobody wants it."""

    stream: TokenStream | None
    prompt_tokens: int
    price: int


class WorkerState:
    """One session with one worker. `worker_id` is the worker's address."""

    def __init__(self, worker_id: str, figures: WorkerFigures, line: WorkerLine) -> None:
        self.worker_id = worker_id
        self.figures = figures
        self.load: LoadReport | None = None
        self.attempts: dict[int, Attempt] = {}
        # A refusal shows that the last report is out of date: wait for the next one.
        self.refused_since_load = False
        self.tokens_in_flight = 0
        self._line = line
        self._submit_number = 0

    def submit(self, stream: TokenStream) -> None:
        """Give the worker a request."""
        generation = stream.generation
        self._submit_number += 1
        stream.attempts += 1
        prompt_tokens = len(generation.prompt_token_ids)
        attempt = Attempt(stream, prompt_tokens, generation.price)
        self.attempts[self._submit_number] = attempt
        self.tokens_in_flight += attempt.price
        self._line.submit(generation, stream.attempts, self._submit_number)
        stream.place(self, self._submit_number)

    def abort(self, submit_number: int) -> None:
        """Nobody wants this attempt any more; it counts until the worker's last entry."""
        attempt = self.attempts.get(submit_number)
        if attempt is not None and attempt.stream is not None:
            attempt.stream = None
            self._line.abort(submit_number)

    def report(self, load: LoadReport) -> None:
        self.load = load
        self.refused_since_load = False

    def deliver(self, submit_number: int, new: NewTokens) -> None:
        """Hand new ids to the request they belong to; those of an aborted one are dropped."""
        attempt = self.attempts.get(submit_number)
        if attempt is not None and attempt.stream is not None:
            attempt.stream.deliver(new)

    def finish(self, submit_number: int, finish: Finish, output_tokens: int) -> None:
        stream = self._end(submit_number)
        if stream is not None:
            stream.finish(finish, output_tokens)

    def refuse(self, submit_number: int, refusal: Refusal, message: str, field: str) -> None:
        if refusal in (Refusal.FULL, Refusal.DRAINING):
            self.refused_since_load = True
        stream = self._end(submit_number)
        if stream is not None:
            stream.refuse(refusal, message, field)

    def close(self) -> None:
        """The session is over and every attempt with it."""
        lost, self.attempts = self.attempts, {}
        self.tokens_in_flight = 0
        for attempt in lost.values():
            if attempt.stream is not None:
                attempt.stream.lose()

    def submitted_since_load(self) -> Iterator[Attempt]:
        """Attempts that the last report does not include."""
        included = self.load.last_submit_number if self.load else 0
        for number in reversed(self.attempts):
            if number <= included:
                return
            yield self.attempts[number]

    def _end(self, submit_number: int) -> TokenStream | None:
        attempt = self.attempts.pop(submit_number, None)
        if attempt is None:
            return None
        self.tokens_in_flight -= attempt.price
        return attempt.stream


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request for `model` may ask for; `default_max_tokens` 0: the room left."""

    model: str
    max_model_len: int
    default_max_tokens: int


class Registry:
    """All connected workers, and which of them may be used for a model.

    `vocab_fingerprint` is the tokenizer's; a worker with another one is not used, since
    its ids mean something else.
    """

    def __init__(self) -> None:
        self.vocab_fingerprint: str | None = None
        self._workers: dict[str, WorkerState] = {}
        # Names outlive their workers, to tell "no worker now" from "no such model".
        self._models: dict[str, str] = {}
        self._left_at: dict[str, float] = {}

    def add(self, worker: WorkerState) -> None:
        figures = worker.figures
        self._workers[worker.worker_id] = worker
        for name in (figures.model, *figures.aliases):
            self._models[name] = figures.model

    def remove(self, worker: WorkerState, now: float) -> None:
        if self._workers.get(worker.worker_id) is worker:
            del self._workers[worker.worker_id]
            self._left_at[worker.figures.model] = now

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(self._workers.values())

    def usable(self, model: str) -> list[WorkerState]:
        """Workers that serve `model` with the tokenizer's vocabulary."""
        return [w for w in self if w.figures.model == model and self.understands(w)]

    def understands(self, worker: WorkerState) -> bool:
        """Whether worker and tokenizer agree about the vocabulary."""
        return worker.figures.vocab_fingerprint == self.vocab_fingerprint

    def unserved_s(self, model: str, now: float) -> float:
        """Seconds since the last usable worker of `model` left; 0 while there is one."""
        return 0.0 if self.usable(model) else now - self._left_at.get(model, now)

    def limits(self, name: str) -> ModelLimits:
        """What the model of this name or alias allows; empty: the only one.

        Raises MODEL_NOT_FOUND, NO_WORKER, VOCABULARY_MISMATCH, or INVALID_FIELD if a
        name is needed.
        """
        model = self._resolve(name)
        workers = self.usable(model)
        if not workers:
            raise self._why_none(model)
        shortest = min((w.figures for w in workers), key=lambda figures: figures.max_model_len)
        return ModelLimits(model, shortest.max_model_len, shortest.default_max_tokens)

    def _resolve(self, name: str) -> str:
        models = sorted({worker.figures.model for worker in self})
        if not models and (not name or name in self._models or not self._models):
            raise RequestError(Reason.NO_WORKER, "no worker is connected")
        if not name and len(models) > 1:
            raise invalid_field("model", f"no name; {len(models)} are served: {', '.join(models)}")
        if name and name not in self._models:
            problem = f"no such model; served: {', '.join(models) or 'none'}"
            raise RequestError(Reason.MODEL_NOT_FOUND, f"model: {problem}")
        return self._models[name] if name else models[0]

    def _why_none(self, model: str) -> RequestError:
        connected = [w for w in self if w.figures.model == model]
        if connected and self.vocab_fingerprint is not None:
            mismatch = "the model's workers and the tokenizer disagree about the vocabulary"
            return RequestError(Reason.VOCABULARY_MISMATCH, mismatch)
        if connected:
            return RequestError(Reason.NO_TOKENIZER, "no tokenizer is connected")
        return RequestError(Reason.NO_WORKER, f"no worker serves {model} now")
