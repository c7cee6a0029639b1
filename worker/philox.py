"""Philox4x32-10: a random number for an address instead of a state.

Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox4x32(counter: Words, key: Words) -> Words:
    """counter uint32 [N, 4], key uint32 [N, 2] -> uint32 [N, 4]."""
    x0, x1, x2, x3 = counter.T
    k0, k1 = key.T
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], x0)
        high1, low1 = _multiply(_MULTIPLIERS[1], x2)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return np.stack((x0, x1, x2, x3), axis=1)


def uniforms(
    seeds: npt.NDArray[np.uint64], output_indices: Words, choices: Words
) -> npt.NDArray[np.float32]:
    """One number in [0, 1) per draw, [N]: multiples of 2^-24, each exact in fp32.

    The key is the 64-bit seed, low word first; the counter is (output index, choice, 0, 0).
    """
    key = np.stack((seeds & _LOW, seeds >> _WORD), axis=1).astype(np.uint32)
    counter = np.zeros((len(seeds), 4), np.uint32)
    counter[:, 0], counter[:, 1] = output_indices, choices
    bits = philox4x32(counter, key)[:, 0] >> np.uint32(8)
    return bits.astype(np.float32) * np.float32(2.0**-24)


def _multiply(multiplier: np.uint64, words: Words) -> tuple[Words, Words]:
    product = words.astype(np.uint64) * multiplier
    return (product >> _WORD).astype(np.uint32), (product & _LOW).astype(np.uint32)
