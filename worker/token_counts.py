"""Which ids a sequence holds, and how often in its output: what penalties are made of."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """The distinct ids of a history, in no order, and how often each was put out.

    A function of the ids alone, so that it can be rebuilt anywhere from prompt and output;
    `add` keeps it up to date in constant time.
    """

    def __init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int]) -> None:
        self._places: dict[int, int] = {}
        for token_id in prompt_token_ids:
            self._places.setdefault(token_id, len(self._places))
        self._ids = np.fromiter(self._places, np.int64, len(self._places))
        self._output_counts = np.zeros(len(self._places), np.float32)
        for token_id in output_token_ids:
            self.add(token_id)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[D], each once."""
        return self._ids[: len(self._places)]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """[D], beside `ids`; 0 for an id that only the prompt has."""
        return self._output_counts[: len(self._places)]

    def add(self, token_id: int) -> None:
        """One more output token."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._grow()
        self._ids[place] = token_id
        self._output_counts[place] += 1

    def _grow(self) -> None:
        more = max(64, len(self._ids))
        self._ids = np.append(self._ids, np.zeros(more, np.int64))
        self._output_counts = np.append(self._output_counts, np.zeros(more, np.float32))
