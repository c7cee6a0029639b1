"""Finds stop strings in a stream of text (Aho and Corasick, 1975)."""

import re
from array import array
from collections.abc import Sequence

_ROOT = 0
_NONE = -1


class StopAutomaton:
    """All stop strings as one automaton: a letter costs the same however many there are.

    Nodes are the beginnings of stop strings, numbered as they are met; the current node is
    the longest one that the text ends with. Nearly all nodes have one child, which is the
    next number: a node takes 16 bytes. Raises ValueError for an empty stop string.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        if not all(stop_strings):
            raise ValueError("a stop string is empty")
        self.stop_strings = tuple(stop_strings)
        # Per node: the letter that leads to the next number, the fail link, which stop string
        # ends there, and how much text may still become one (until linked: its length).
        self._letter = array("i", [_NONE])
        self._fail = array("i", [_ROOT])
        self._match = array("i", [_NONE])
        self.held_length = array("i", [0])
        # The other children, by node and letter.
        self._branches: dict[tuple[int, int], int] = {}
        arrivals = [(_ROOT, _NONE)]
        for index, stop in enumerate(stop_strings):
            self._insert(stop, index, arrivals)
        self._link(arrivals)
        first_letters = "".join({re.escape(stop[0]) for stop in stop_strings})
        self._first = re.compile(f"[{first_letters}]" if first_letters else "(?!)")

    def _insert(self, stop: str, index: int, arrivals: list[tuple[int, int]]) -> None:
        """Add what is new of a stop string; `arrivals` has each node's parent and letter."""
        letters, node, depth = [ord(letter) for letter in stop], _ROOT, 0
        while depth < len(letters):
            child = self._child(node, letters[depth])
            if child is None:
                node = self._append(node, letters[depth:], arrivals)
                break
            node, depth = child, depth + 1
        if self._match[node] == _NONE:
            self._match[node] = index

    def _append(self, parent: int, letters: list[int], arrivals: list[tuple[int, int]]) -> int:
        """Add a node for each letter, one below the other; the last of them."""
        first, count = len(arrivals), len(letters)
        if parent == first - 1:
            self._letter[parent] = letters[0]
        else:
            self._branches[parent, letters[0]] = first
        arrivals.extend(zip((parent, *range(first, first + count - 1)), letters, strict=True))
        self._letter.extend([*letters[1:], _NONE])
        self._fail.extend([_ROOT] * count)
        self._match.extend([_NONE] * count)
        length = self.held_length[parent] + 1
        self.held_length.extend(range(length, length + count))
        return first + count - 1

    def _child(self, node: int, letter: int) -> int | None:
        return node + 1 if self._letter[node] == letter else self._branches.get((node, letter))

    def _link(self, arrivals: Sequence[tuple[int, int]]) -> None:
        """Set each node's fail link, shorter nodes first, and what depends on it."""
        branching = {node for node, _ in self._branches}
        for node in sorted(range(1, len(arrivals)), key=self.held_length.__getitem__):
            parent, letter = arrivals[node]
            if parent != _ROOT:
                self._fail[node] = self._step(self._fail[parent], letter)
            fail = self._fail[node]
            if self._match[fail] != _NONE:
                ends = (self._match[fail], self._match[node])
                self._match[node] = min(index for index in ends if index != _NONE)
            if self._letter[node] == _NONE and node not in branching:
                self.held_length[node] = self.held_length[fail]

    def step(self, node: int, letter: str) -> int:
        """The node after one more letter."""
        return self._step(node, ord(letter))

    def _step(self, node: int, letter: int) -> int:
        while (child := self._child(node, letter)) is None:
            if node == _ROOT:
                return _ROOT
            node = self._fail[node]
        return child

    def match(self, node: int) -> int | None:
        """The index of the stop string that ends at a node."""
        return None if self._match[node] == _NONE else self._match[node]

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
            matched = automaton.match(node)
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
