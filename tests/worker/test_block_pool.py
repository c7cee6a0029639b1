"""The block pool gives every block to at most one owner and loses none."""

import pytest

from worker.block_pool import NULL_BLOCK, BlockPool


def test_blocks_are_handed_out_once_and_the_null_block_never():
    pool = BlockPool(5, 4)
    taken = pool.allocate(5)
    assert sorted(taken) == [1, 2, 3, 4, 5]
    assert NULL_BLOCK not in taken
    assert (pool.num_free, pool.num_used) == (0, 5)


def test_too_many_blocks_are_refused_whole():
    pool = BlockPool(3, 4)
    pool.allocate(2)
    with pytest.raises(ValueError, match="2 blocks wanted, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (31, 2), (32, 2), (33, 3)]
)
def test_a_length_at_a_block_boundary_takes_no_extra_block(tokens, blocks):
    assert BlockPool(4, 16).blocks_for(tokens) == blocks


@pytest.mark.parametrize("block", [0, 2, 4, -1])
def test_releasing_what_is_not_held_is_an_error(block):
    pool = BlockPool(3, 4)
    pool.allocate(1)
    with pytest.raises(ValueError, match="not held"):
        pool.release([block])


def test_a_double_release_is_an_error():
    pool = BlockPool(3, 4)
    taken = pool.allocate(2)
    pool.release(taken)
    with pytest.raises(ValueError, match="not held"):
        pool.release(taken[:1])


def test_integrity_notices_a_leak_and_a_second_owner():
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2), pool.allocate(1)
    pool.check_integrity([first, second])
    with pytest.raises(RuntimeError, match="accounted for"):
        pool.check_integrity([first])
    with pytest.raises(RuntimeError, match="two owners"):
        pool.check_integrity([first, second, second])


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(blocks, size):
    with pytest.raises(ValueError, match="must be >= 1"):
        BlockPool(blocks, size)
