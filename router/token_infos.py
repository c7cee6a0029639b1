"""Log-probabilities on their way to the client: they wait for bytes and for text."""

from collections import deque
from collections.abc import Sequence
from math import inf

from router.events import TokenAlternative, TokenInfo
from router.worker_news import ChosenToken


class TokenInfos:
    """Those of one output. A token is told of once its text is accounted for."""

    def __init__(self) -> None:
        # (index of the output id, the id itself, what the worker said of it)
        self._waiting: deque[tuple[int, int, ChosenToken]] = deque()
        self._pieces: deque[bytes] = deque()

    def add(self, first_index: int, ids: Sequence[int], chosen: Sequence[ChosenToken]) -> list[int]:
        """The next output ids; the ids whose bytes are wanted for them, in this order."""
        wanted: list[int] = []
        for index, (token_id, told) in enumerate(zip(ids, chosen, strict=False), first_index):
            self._waiting.append((index, token_id, told))
            wanted += [token_id, *(other for other, _ in told.alternatives)]
        return wanted

    def add_pieces(self, pieces: Sequence[bytes]) -> None:
        """The bytes of ids that were wanted, in the same order."""
        self._pieces.extend(pieces)

    def take(self, num_ids: float = inf) -> list[TokenInfo]:
        """All that is known of the first `num_ids` output ids and was not taken yet."""
        taken = []
        while self._waiting and self._waiting[0][0] < num_ids:
            _, token_id, told = self._waiting[0]
            if len(self._pieces) < 1 + len(told.alternatives):
                break
            self._waiting.popleft()
            piece = self._pieces.popleft()
            alternatives = [
                TokenAlternative(other, self._pieces.popleft(), logprob)
                for other, logprob in told.alternatives
            ]
            taken.append(TokenInfo(token_id, piece, told.logprob, alternatives))
        return taken
