"""Log-probabilities on their way to the client: they wait for bytes and for text."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from router.events import TokenAlternative, TokenInfo
from router.worker_news import ChosenToken


@dataclass(frozen=True, slots=True)
class _Told:
    """A token without its bytes; `index` is its place in the output, -1 in the prompt."""

    index: int
    token_id: int
    said: ChosenToken

    def wanted(self) -> list[int]:
        return [self.token_id, *(other for other, _ in self.said.alternatives)]


class TokenInfos:
    """Those of one output, and before it of its prompt, if that is to be told of.

    An output token is told of once its text is accounted for, a prompt token as soon as its
    bytes are there, and once, however many attempts compute it.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Told] = deque()
        self._pieces: deque[bytes] = deque()
        self._prompt_ids: Sequence[int] = ()
        # How many ids of the prompt any attempt has told of, and the one under way.
        self._num_prompt = self._num_prompt_here = 0

    def begin_prompt(self, token_ids: Sequence[int]) -> list[int]:
        """Tell of these; the ids whose bytes are wanted for the first, which nothing precedes."""
        self._prompt_ids = token_ids
        return self.add_prompt([ChosenToken(None, ())])

    def begin_attempt(self) -> None:
        """The prompt is told of again, from its second id on."""
        self._num_prompt_here = min(1, self._num_prompt)

    def add_prompt(self, said: Sequence[ChosenToken]) -> list[int]:
        """The next prompt ids; the ids whose bytes are wanted for those that are new."""
        known = self._num_prompt - self._num_prompt_here
        self._num_prompt_here += len(said)
        ids = self._prompt_ids[self._num_prompt : self._num_prompt_here]
        self._num_prompt += len(ids)
        new = zip(ids, said[known:], strict=False)
        return self._wait_for([_Told(-1, token_id, token) for token_id, token in new])

    def add(self, first_index: int, ids: Sequence[int], chosen: Sequence[ChosenToken]) -> list[int]:
        """The next output ids; the ids whose bytes are wanted for them, in this order."""
        told = enumerate(zip(ids, chosen, strict=False), first_index)
        return self._wait_for([_Told(index, token_id, said) for index, (token_id, said) in told])

    def add_pieces(self, pieces: Sequence[bytes]) -> None:
        """The bytes of ids that were wanted, in the same order."""
        self._pieces.extend(pieces)

    def take_prompt(self) -> list[TokenInfo]:
        """All that is known of the prompt and was not taken yet."""
        return self.take(0)

    def take(self, num_ids: float = inf) -> list[TokenInfo]:
        """All that is known of the first `num_ids` output ids and was not taken yet."""
        taken = []
        while self._waiting and self._waiting[0].index < num_ids:
            told = self._waiting[0]
            if len(self._pieces) < 1 + len(told.said.alternatives):
                break
            self._waiting.popleft()
            piece = self._pieces.popleft()
            alternatives = [
                TokenAlternative(other, self._pieces.popleft(), logprob)
                for other, logprob in told.said.alternatives
            ]
            taken.append(TokenInfo(told.token_id, piece, told.said.logprob, alternatives))
        return taken

    def _wait_for(self, told: Sequence[_Told]) -> list[int]:
        self._waiting.extend(told)
        return [wanted for token in told for wanted in token.wanted()]
