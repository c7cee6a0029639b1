"""Many slots of one router, and the outbox in front of a reader that may be slow."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.vocabularies import bytes_vocabulary
from tokenizer_svc import decode_slots
from tokenizer_svc.decode_slot import SlotOptions
from tokenizer_svc.decode_slots import DecodeSlots
from tokenizer_svc.stop import StopAutomaton

BYTES = bytes_vocabulary()


async def taken(slots):
    """All texts that wait, oldest first."""
    return [text for pending in await slots.outbox.take() for text in pending.texts.values()]


def joined(texts, slot):
    return "".join("".join(text.text) for text in texts if text.slot == slot)


async def test_ids_become_text_with_offsets_and_counts():
    """A reader that keeps up gets one text per delta, also where no character is complete."""
    slots = DecodeSlots(BYTES)
    slots.open(7, SlotOptions())
    answers = []
    for ids in ("네".encode(), b",", "한".encode()[:2], "한".encode()[2:]):
        slots.feed(7, list(ids))
        answers += await taken(slots)
    assert [("".join(a.text), a.byte_offset, a.num_ids) for a in answers] == [
        ("네", 0, 3),
        (",", 3, 4),
        ("", 4, 6),
        ("한", 4, 7),
    ]


async def test_texts_of_a_slow_reader_merge_by_slot():
    """However much is decoded, one text per slot waits, and nothing is lost."""
    slots = DecodeSlots(BYTES)
    for slot in (1, 2):
        slots.open(slot, SlotOptions())
    for i in range(1000):
        slots.feed(1 + i % 2, [65 + i % 26], wanted_ids=[65])
    (pending,) = await slots.outbox.take()
    assert sorted(pending.texts) == [1, 2]
    assert len(joined(pending.texts.values(), 1)) == 500
    assert pending.texts[1].num_ids == 500
    assert pending.texts[2].pieces == [b"A"] * 500


async def test_a_stop_string_ends_the_slot_and_later_ids_are_ignored():
    """The verdict comes once; `close` still answers, with the same verdict and no more text."""
    slots = DecodeSlots(BYTES)
    slots.open(1, SlotOptions(("bc",)))
    slots.feed(1, list(b"abcd"))
    slots.feed(1, list(b"more"))
    (answer,) = await taken(slots)
    assert ("".join(answer.text), answer.num_ids, answer.stop.token_index) == ("a", 3, 2)
    slots.close(1, flush=True)
    (answer,) = await taken(slots)
    assert ("".join(answer.text), answer.num_ids, answer.closed) == ("", 3, True)


async def test_closing_gives_out_what_was_held_back_if_asked():
    """With `flush` the beginning of a stop string is text after all; without it is dropped."""
    for flush, text in ((True, "abc"), (False, "a")):
        slots = DecodeSlots(BYTES)
        slots.open(1, SlotOptions(("bcd",)))
        slots.feed(1, list(b"abc"))
        slots.close(1, flush=flush)
        (answer,) = await taken(slots)
        assert ("".join(answer.text), answer.closed, slots.num_slots) == (text, True, 0)


async def test_replayed_ids_give_the_same_text_as_before():
    """After a reopen elsewhere the text is the same from its beginning on."""
    ids = list("한 bc 글자".encode())
    live, again = DecodeSlots(BYTES), DecodeSlots(BYTES)
    for slots in (live, again):
        slots.open(1, SlotOptions(("c 글자!",)))
    for i in ids:
        live.feed(1, [i])
    again.feed(1, ids)
    (first,), (second,) = await taken(live), await taken(again)
    assert "".join(first.text) == "".join(second.text) == "한 b"
    assert first.num_ids == second.num_ids == len(ids)


async def test_errors_close_their_own_slot_alone():
    """DET-05: unknown ids, bad options, a slot opened twice, too many slots."""
    slots = DecodeSlots(BYTES, max_slots=2)
    slots.open(1, SlotOptions())
    slots.open(2, SlotOptions())
    slots.feed(1, [65])
    slots.feed(2, [65, 9999])
    slots.feed(2, [66])
    slots.open(3, SlotOptions(("",)))
    slots.open(4, SlotOptions())
    slots.open(5, SlotOptions())
    slots.open(4, SlotOptions())
    slots.feed(1, [66])
    texts = {text.slot: text for text in await taken(slots)}
    assert "".join(texts[1].text) == "AB"
    assert not texts[1].closed
    assert texts[2].error == "token_ids: not below 257, the size of the vocabulary"
    assert "stop_sequences[0]: 0 bytes" in texts[3].error
    assert "open already" in texts[4].error
    assert texts[5].error == "2 slots are open; at most 2"
    assert all(texts[slot].closed for slot in (2, 3, 4, 5))
    assert slots.num_slots == 1


async def test_unknown_slots_are_ignored():
    """Messages for a slot that has just closed were on their way."""
    slots = DecodeSlots(BYTES)
    slots.feed(1, [65])
    slots.close(1, flush=True)
    slots.announce_draining()
    (pending,) = await slots.outbox.take()
    assert (pending.texts, pending.draining) == ({}, True)


class DecodeSlotsMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order, every slot's texts tell its whole story."""

    def __init__(self):
        super().__init__()
        self.slots = DecodeSlots(BYTES)
        self.fed = {}
        self.closed = set()
        self.next_slot = 0

    @rule()
    def open(self):
        self.slots.open(self.next_slot, SlotOptions())
        self.fed[self.next_slot] = b""
        self.next_slot += 1

    @rule(slot=st.integers(0, 5), text=st.text("a한", max_size=3))
    def feed(self, slot, text):
        self.slots.feed(slot, list(text.encode()))
        if slot in self.fed and slot not in self.closed:
            self.fed[slot] += text.encode()

    @rule(slot=st.integers(0, 5))
    def close(self, slot):
        self.slots.close(slot, flush=True)
        if slot in self.fed:
            self.closed.add(slot)

    @invariant()
    def texts_say_what_was_fed(self):
        waiting = self.slots.outbox._items  # the reader never comes
        texts = [text for pending in waiting for text in pending.texts.values()]
        for slot, fed in self.fed.items():
            assert joined(texts, slot) == fed.decode()
            assert max((t.num_ids for t in texts if t.slot == slot), default=0) == len(fed)
            assert any(t.closed for t in texts if t.slot == slot) == (slot in self.closed)
        assert self.slots.num_slots == len(self.fed) - len(self.closed)


TestDecodeSlotsMachine = DecodeSlotsMachine.TestCase
TestDecodeSlotsMachine.settings = settings(max_examples=60, stateful_step_count=25)


def test_slots_with_the_same_stop_strings_share_one_automaton(monkeypatch):
    """It is built once, kept as long as a slot uses it, and no longer."""
    built = []

    class Counting(StopAutomaton):
        def __init__(self, stops):
            built.append(stops)
            super().__init__(stops)

    monkeypatch.setattr(decode_slots, "StopAutomaton", Counting)
    slots = DecodeSlots(BYTES)
    for slot in (1, 2):
        slots.open(slot, SlotOptions(stop_sequences=("x", "y")))
    slots.open(3, SlotOptions(stop_sequences=("y", "x")))
    assert built == [("x", "y"), ("y", "x")]
    for slot in (1, 2):
        slots.close(slot, flush=False)
    slots.open(4, SlotOptions(stop_sequences=("x", "y")))
    assert built == [("x", "y"), ("y", "x"), ("x", "y")]
