"""Whose ids mean what: the vocabularies of models, as tokenizers tell them."""


class Vocabularies:
    """What each tokenizer says it has, and which vocabulary counts for a model.

    Outlives connections: a tokenizer that is away still has what it said last. Where several
    have the same model the first one's word counts for as long as one of them keeps to it.
    `any_name`: a lone tokenizer, whose name for its model says nothing, has every model.
    """

    def __init__(self, *, any_name: bool) -> None:
        self._any_name = any_name
        # By the tokenizer's address: the model's name, and the vocabulary's fingerprint.
        self._told: dict[str, tuple[str, str]] = {}
        self._agreed: dict[str, str] = {}

    def tell(self, tokenizer: str, model: str, fingerprint: str) -> bool:
        """Take in what a tokenizer says of itself; it has one model.

        Whether it said something else before.
        """
        before = self._told.get(tokenizer, (model, fingerprint))
        self._told[tokenizer] = (model, fingerprint)
        self._agreed = {name: self._agree(name) for name, _ in self._told.values()}
        return before != (model, fingerprint)

    def of(self, model: str) -> str | None:
        """The fingerprint that counts; None if no tokenizer has told of this model."""
        if self._any_name:
            return next(iter(self._agreed.values()), None)
        return self._agreed.get(model)

    def has(self, tokenizer: str, model: str) -> bool:
        """Whether this tokenizer has the model, with the vocabulary that counts."""
        name, fingerprint = self._told.get(tokenizer, ("", ""))
        return (self._any_name or name == model) and fingerprint == self.of(model)

    def _agree(self, model: str) -> str:
        told = [fingerprint for name, fingerprint in self._told.values() if name == model]
        known = self._agreed.get(model)
        return known if known is not None and known in told else told[0]
