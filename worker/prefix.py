"""Digests of block-sized prefixes, by which cached K/V are found again.

A chain of SHA-256, one link per full block: a block's digest stands for everything up to
its end, and for the salt. Prompts of different salts therefore never meet, and nobody can
construct a prompt that is taken for another's.
"""

import hashlib
from array import array
from collections.abc import Sequence as Ids

from worker.sequence import Sequence


def root_digest(salt: bytes) -> bytes:
    """The chain's beginning; `salt` is opaque."""
    return hashlib.sha256(b"noria prefix\0" + salt).digest()


def next_digest(parent: bytes, token_ids: Ids[int]) -> bytes:
    """The digest after one more block; ids are framed as 4 bytes each."""
    # The parent has a fixed length, so that ids cannot be taken for a part of it.
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()


def extend_digests(sequence: Sequence, num_blocks: int, block_size: int) -> list[bytes]:
    """The digests of the sequence's first `num_blocks` blocks, all full; kept with it."""
    digests = sequence.block_digests
    parent = digests[-1] if digests else root_digest(sequence.cache_salt)
    for index in range(len(digests), num_blocks):
        ids = sequence.token_ids(index * block_size, (index + 1) * block_size)
        parent = next_digest(parent, ids)
        digests.append(parent)
    return digests[:num_blocks]
