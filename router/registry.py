"""The workers this router is connected to, and which of them may be used for what."""

from collections.abc import Iterator
from dataclasses import dataclass

from noria.reasons import Reason, RequestError, invalid_field
from router.vocabularies import Vocabularies
from router.worker_state import WorkerState

# Model names that a key may use; None: all.
Names = frozenset[str] | None


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request for `model` may ask for; `default_max_tokens` 0: the room left."""

    model: str
    max_model_len: int
    default_max_tokens: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with `workers` usable workers, and its other names."""

    limits: ModelLimits
    aliases: tuple[str, ...]
    workers: int


class Registry:
    """All connected workers, and which of them may be used for a model.

    A worker whose vocabulary is not that of its model's tokenizers is not used: its ids mean
    something else. `any_name`: the one tokenizer that there is has every model, whatever it
    calls its own.
    """

    def __init__(self, *, any_name: bool = True) -> None:
        self._vocabularies = Vocabularies(any_name=any_name)
        self._workers: dict[str, WorkerState] = {}
        # Names outlive their workers, to tell "no worker now" from "no such model".
        self._remembered: dict[str, str] = {}
        self._models: dict[str, str] = {}
        self._unserved_since: dict[str, float] = {}

    def tell_vocabulary(self, tokenizer: str, model: str, fingerprint: str) -> frozenset[str]:
        """Take in what a tokenizer has; the models whose ids may now mean something else.

        These are the models that had another vocabulary before, and all that this tokenizer
        had, if it came back as another: others may keep to the vocabulary, its slots cannot.
        """
        before = {name: self.vocabulary(name) for name in self._models.values()}
        had = {name for name in before if self.has_model(tokenizer, name)}
        is_another = self._vocabularies.tell(tokenizer, model, fingerprint)
        changed = {name for name in before if before[name] != self.vocabulary(name)}
        for name in changed:
            self._unserved_since.pop(name, None)
        known = {name for name in changed if before[name] is not None}
        return frozenset(known | had) if is_another else frozenset(known)

    def vocabulary(self, model: str) -> str | None:
        """The fingerprint of the model's vocabulary; None before a tokenizer has told it."""
        return self._vocabularies.of(model)

    def has_model(self, tokenizer: str, model: str) -> bool:
        """Whether this tokenizer has the model, with the vocabulary that counts."""
        return self._vocabularies.has(tokenizer, model)

    def add(self, worker: WorkerState) -> None:
        figures = worker.figures
        self._workers[worker.worker_id] = worker
        self._remembered |= dict.fromkeys((*figures.aliases, figures.model), figures.model)
        self._name_models()
        self._unserved_since.pop(figures.model, None)

    def remove(self, worker: WorkerState) -> None:
        if self._workers.get(worker.worker_id) is worker:
            del self._workers[worker.worker_id]
            self._name_models()

    def used(self, worker: WorkerState) -> None:
        """The worker was given a request: in the order of all, it is now the last."""
        if self._workers.get(worker.worker_id) is worker:
            del self._workers[worker.worker_id]
            self._workers[worker.worker_id] = worker

    def has(self, worker_id: str) -> bool:
        """Whether the worker of this id is connected."""
        return worker_id in self._workers

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(self._workers.values())

    def usable(self, model: str) -> list[WorkerState]:
        """Workers that serve `model` with its tokenizer's vocabulary."""
        return [w for w in self if w.figures.model == model and self.understands(w)]

    def understands(self, worker: WorkerState) -> bool:
        """Whether worker and tokenizer agree about the vocabulary."""
        return worker.figures.vocab_fingerprint == self.vocabulary(worker.figures.model)

    def unserved_s(self, model: str, now: float) -> float:
        """For how long this has been asked while no worker was usable; 0 while there is one."""
        if self.usable(model):
            self._unserved_since.pop(model, None)
            return 0.0
        return now - self._unserved_since.setdefault(model, now)

    def permits(self, model: str, allowed: Names) -> bool:
        """Whether `allowed` holds the name of a model or one of its aliases."""
        return allowed is None or any(
            name in allowed for name, named in self._models.items() if named == model
        )

    def models(self, allowed: Names = None) -> list[ServedModel]:
        """The models with a usable worker that `allowed` permits, by name."""
        return [
            self._served(model)
            for model in sorted({worker.figures.model for worker in self})
            if self.permits(model, allowed) and self.usable(model)
        ]

    def limits(self, name: str, allowed: Names = None) -> ModelLimits:
        """What the model of this name or alias allows; empty: the only one of the allowed.

        Raises MODEL_NOT_FOUND, MODEL_FORBIDDEN, NO_WORKER, VOCABULARY_MISMATCH, or
        INVALID_FIELD if a name is needed.
        """
        model = self._resolve(name, allowed)
        workers = self.usable(model)
        if not workers:
            raise self._why_none(model)
        return self._limits_of(model, workers)

    def _name_models(self) -> None:
        """What each name means now: what connected workers say, then what is remembered.

        A model's own name is never another's alias; of two that claim an alias the one at the
        first address has it.
        """
        connected: dict[str, str] = {}
        figures = [self._workers[worker_id].figures for worker_id in sorted(self._workers)]
        for each in figures:
            for alias in each.aliases:
                connected.setdefault(alias, each.model)
        connected |= {each.model: each.model for each in figures}
        here = set(connected.values())
        gone = {name: model for name, model in self._remembered.items() if model not in here}
        self._models = gone | connected

    def _served(self, model: str) -> ServedModel:
        workers = self.usable(model)
        aliases = {alias for worker in workers for alias in worker.figures.aliases}
        limits = self._limits_of(model, workers)
        return ServedModel(limits, tuple(sorted(aliases - {model})), len(workers))

    def _limits_of(self, model: str, workers: list[WorkerState]) -> ModelLimits:
        shortest = min((w.figures for w in workers), key=lambda figures: figures.max_model_len)
        return ModelLimits(model, shortest.max_model_len, shortest.default_max_tokens)

    def _resolve(self, name: str, allowed: Names) -> str:
        models = sorted({worker.figures.model for worker in self})
        if not models and (not name or name in self._models or not self._models):
            raise RequestError(Reason.NO_WORKER, "no worker is connected")
        # Of models that a key may not use it is not told either.
        own = [model for model in models if self.permits(model, allowed)]
        if not name:
            return self._only_one(own, allowed)
        if name not in self._models:
            problem = f"no such model; served: {', '.join(own) or 'none'}"
            raise RequestError(Reason.MODEL_NOT_FOUND, f"model: {problem}")
        if not self.permits(self._models[name], allowed):
            raise _forbidden(own)
        return self._models[name]

    def _only_one(self, own: list[str], allowed: Names) -> str:
        if len(own) > 1:
            raise invalid_field("model", f"no name; {len(own)} are served: {', '.join(own)}")
        if own:
            return own[0]
        if any(self.permits(model, allowed) for model in self._models.values()):
            raise RequestError(Reason.NO_WORKER, "no worker of the models of this API key")
        raise _forbidden(own)

    def _why_none(self, model: str) -> RequestError:
        connected = [w for w in self if w.figures.model == model]
        if connected and self.vocabulary(model) is not None:
            mismatch = "the model's workers and the tokenizer disagree about the vocabulary"
            return RequestError(Reason.VOCABULARY_MISMATCH, mismatch)
        if connected:
            return RequestError(Reason.NO_TOKENIZER, f"no tokenizer of {model} is connected")
        return RequestError(Reason.NO_WORKER, f"no worker serves {model} now")


def _forbidden(own: list[str]) -> RequestError:
    problem = f"not one of this API key; it may use {', '.join(own) or 'none that is served'}"
    return RequestError(Reason.MODEL_FORBIDDEN, f"model: {problem}")
