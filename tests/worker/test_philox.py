"""Philox4x32-10 gives the published numbers, and uniforms are functions of their address."""

import numpy as np
import pytest

from worker.philox import philox4x32, uniforms

# counter (4 words), key (2 words), output (4 words): `kat_vectors` of the Random123 library.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text):
    return np.array([[int(word, 16) for word in text.split()]], np.uint32)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    assert np.array_equal(philox4x32(words(counter), words(key)), words(expected))


def test_a_batch_equals_its_rows():
    counters = np.concatenate([words(counter) for counter, _, _ in KNOWN_ANSWERS])
    keys = np.concatenate([words(key) for _, key, _ in KNOWN_ANSWERS])
    expected = np.concatenate([words(answer) for _, _, answer in KNOWN_ANSWERS])
    assert np.array_equal(philox4x32(counters, keys), expected)


def one_uniform(seed, output_index, choice):
    return uniforms(
        np.array([seed], np.uint64), np.array([output_index], np.uint32),
        np.array([choice], np.uint32),
    )[0]  # fmt: skip


def test_the_address_is_low_and_high_seed_word_output_index_and_choice():
    """A uniform is the top 24 bits of the first word at (index, choice, 0, 0)."""
    bits = philox4x32(words("00000007 00000003 0 0"), words("89abcdef 01234567"))[0, 0]
    expected = np.float32(int(bits) >> 8) / np.float32(2**24)
    assert one_uniform(0x0123456789ABCDEF, 7, 3) == expected


def test_every_part_of_the_address_matters():
    numbers = {
        float(one_uniform(*address))
        for address in [(1, 0, 0), (2, 0, 0), (1 + (1 << 32), 0, 0), (1, 1, 0), (1, 0, 1)]
    }
    assert len(numbers) == 5


def test_uniforms_are_below_one_and_even():
    seeds = np.full(20_000, 2**64 - 1, np.uint64)
    numbers = uniforms(seeds, np.arange(20_000, dtype=np.uint32), np.zeros(20_000, np.uint32))
    assert numbers.dtype == np.float32
    assert 0 <= numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 5 / np.sqrt(12 * 20_000)
