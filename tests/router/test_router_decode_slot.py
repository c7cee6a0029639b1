"""A slot's text is the undisturbed text, wherever its session breaks."""

from hypothesis import given
from hypothesis import strategies as st

from noria.reasons import Reason
from router.decode_slot import DecodeSlot, SlotOptions, SlotText

OPTIONS = SlotOptions((), 0, True, (), False)


class Port:
    def __init__(self):
        self.calls = []

    def open(self, slot):
        self.calls.append("open")
        return 1

    def feed(self, number, token_ids, wanted_ids):
        self.calls.append(tuple(token_ids))

    def finish(self, number):
        self.calls.append("finish")

    def close(self, number, *, tell):
        self.calls.append("close" if tell else "forget")


class Sink:
    def __init__(self):
        self.text, self.stop, self.ends, self.errors = "", None, 0, []
        self.pieces = []

    def on_text(self, text, num_ids, pieces=()):
        self.text += text
        self.pieces += pieces

    def on_stop(self, stop_index, token_index, duration_us):
        self.stop = (stop_index, token_index)

    def on_text_end(self, duration_us):
        self.ends += 1

    def on_failed(self, error):
        self.errors.append(error.reason)


def slot() -> tuple[DecodeSlot, Port, Sink]:
    port, sink = Port(), Sink()
    return DecodeSlot(OPTIONS, sink, port), port, sink


def at(offset: int, text: str, **more) -> SlotText:
    return SlotText(offset, text, 1, **more)


def test_a_slot_opens_with_its_first_ids_and_closes_with_its_block():
    held, port, _ = slot()
    with held:
        held.feed([])
        assert port.calls == []
        held.feed([1, 2])
        held.feed([3])
    assert port.calls == ["open", (1, 2), (3,), "close"]
    assert held.token_ids == [1, 2, 3]


def test_a_slot_that_never_opened_ends_at_once():
    held, port, sink = slot()
    held.finish()
    assert (sink.ends, port.calls) == (1, [])


def test_a_finished_slot_ends_once_and_is_forgotten():
    held, port, sink = slot()
    with held:
        held.feed([1])
        held.finish()
        held.finish()
        held.receive(at(0, "a", closed=True))
        held.receive(at(1, "b", closed=True))
    assert (sink.text, sink.ends) == ("a", 1)
    assert port.calls == ["open", (1,), "finish", "forget"]


def test_ids_whose_bytes_have_not_come_stay_wanted():
    """So that another session can be asked for the rest of them."""
    held, port, sink = slot()
    held.feed([1], [1, 5, 6])
    held.feed([2], [2, 7, 8])
    held.receive(at(0, "a", pieces=[b"a", b"e", b"f"]))
    assert held.wanted_ids == [2, 7, 8]
    held.feed([], [3])
    assert port.calls == ["open", (1,), (2,), ()]
    held.receive(at(1, "", pieces=[b"b", b"g", b"h", b"c"]))
    assert (held.wanted_ids, sink.pieces) == ([], [b"a", b"e", b"f", b"b", b"g", b"h", b"c"])


def test_a_stop_match_ends_the_slot_after_its_text():
    held, port, sink = slot()
    held.feed([1])
    held.receive(at(0, "a", stop=(2, 0)))
    assert (sink.text, sink.stop, sink.ends, port.calls[-1]) == ("a", (2, 0), 0, "close")


@given(
    st.lists(st.text(max_size=5), max_size=8),
    st.lists(st.integers(0, 8), max_size=4),
)
def test_text_after_reopening_continues_where_it_was(pieces, breaks):
    """Each break replays all text so far in one piece, or piece by piece."""
    held, _, sink = slot()
    held.feed([1])
    offset, so_far = 0, ""
    for count, piece in enumerate(pieces):
        held.receive(at(offset, piece))
        offset, so_far = offset + len(piece.encode()), so_far + piece
        if count in breaks:
            held.receive(at(0, so_far))
        if count + 1 in breaks:
            replayed = 0
            for earlier in pieces[: count + 1]:
                held.receive(at(replayed, earlier))
                replayed += len(earlier.encode())
    assert sink.text == "".join(pieces)
    assert not sink.errors


def test_text_that_cannot_continue_what_was_sent_is_an_error_not_a_gap():
    for bad in (at(3, "x"), at(0, "éé")):
        held, _, sink = slot()
        held.feed([1])
        held.receive(at(0, "a"))
        held.receive(bad)
        held.receive(at(1, "b"))
        assert sink.text == "a"
        assert sink.errors == [Reason.INTERNAL]
