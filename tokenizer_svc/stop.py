"""Finds stop strings in a stream of text (Aho and Corasick, 1975)."""

import re
from collections import deque
from collections.abc import Sequence

_ROOT = 0


class StopAutomaton:
    """All stop strings as one automaton: a letter costs the same however many there are.

    Nodes are the beginnings of stop strings; the current node is the longest one that the
    text ends with. Raises ValueError for an empty stop string.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        if not all(stop_strings):
            raise ValueError("a stop string is empty")
        self.stop_strings = tuple(stop_strings)
        self._edges: list[dict[str, int]] = [{}]
        self._fail = [_ROOT]
        # Per node: which stop string ends there, and how much text may still become one.
        self.match: list[int | None] = [None]
        self.held_length = [0]
        for index, stop in enumerate(stop_strings):
            self._insert(stop, index)
        self._link()
        first_letters = "".join(map(re.escape, self._edges[_ROOT]))
        self._first = re.compile(f"[{first_letters}]" if first_letters else "(?!)")

    def _insert(self, stop: str, index: int) -> None:
        node = _ROOT
        for depth, letter in enumerate(stop, start=1):
            if letter not in self._edges[node]:
                self._edges[node][letter] = len(self._edges)
                self._edges.append({})
                self._fail.append(_ROOT)
                self.match.append(None)
                self.held_length.append(depth)
            node = self._edges[node][letter]
        if self.match[node] is None:
            self.match[node] = index

    def _link(self) -> None:
        """Set each node's fail link, in breadth-first order, and what depends on it."""
        waiting = deque(self._edges[_ROOT].values())
        while waiting:
            node = waiting.popleft()
            fail = self._fail[node]
            ends = [i for i in (self.match[node], self.match[fail]) if i is not None]
            self.match[node] = min(ends, default=None)
            if not self._edges[node]:
                self.held_length[node] = self.held_length[fail]
            for letter, child in self._edges[node].items():
                self._fail[child] = self.step(fail, letter)
                waiting.append(child)

    def step(self, node: int, letter: str) -> int:
        """The node after one more letter."""
        while letter not in self._edges[node]:
            if node == _ROOT:
                return _ROOT
            node = self._fail[node]
        return self._edges[node][letter]

    def next_start(self, text: str, position: int) -> int:
        """Where from `position` on a stop string may begin; the text's end if nowhere."""
        found = self._first.search(text, position)
        return found.start() if found else len(text)


class StopMatcher:
    """Cuts one output at its first stop string.

    The match whose last letter comes first wins; of several that end with the same letter,
    the one first in the list. Held back is only the longest ending of the text that is a
    proper beginning of a stop string.
    """

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._node = _ROOT
        self._held = ""

    def push(self, text: str, *, counts: bool) -> tuple[str, int | None]:
        """The text that is now certain, and the index of the stop string that matched.

        On a match the text before it is complete and the rest is dropped. Matches that end
        in text that does not count are let through as text.
        """
        automaton, node, whole = self._automaton, self._node, self._held + text
        position = len(self._held)
        while position < len(whole):
            if node == _ROOT:
                position = automaton.next_start(whole, position)
                if position == len(whole):
                    break
            node = automaton.step(node, whole[position])
            position += 1
            matched = automaton.match[node]
            if matched is not None and counts:
                self._held = ""
                return whole[: position - len(automaton.stop_strings[matched])], matched
        certain = len(whole) - automaton.held_length[node]
        self._node, self._held = node, whole[certain:]
        return whole[:certain], None

    def flush(self) -> str:
        """The text still held back, when nothing follows."""
        held, self._held, self._node = self._held, "", _ROOT
        return held
