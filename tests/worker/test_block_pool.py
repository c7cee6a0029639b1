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
    with pytest.raises(RuntimeError, match="3 KV blocks used, 2 accounted for"):
        pool.check_integrity([first])
    with pytest.raises(RuntimeError, match="used, 3 accounted for"):
        pool.check_integrity([first, second, second])
    pool.share(second)
    with pytest.raises(RuntimeError, match="still be written has two owners"):
        pool.check_integrity([first, second, second])


def test_a_published_block_is_found_by_its_digest_until_it_is_handed_out_again():
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1)
    pool.publish(block, b"a")
    pool.release([block])
    assert pool.find([b"a", b"b"]) == [block]
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 1, 0)
    pool.allocate(2)
    assert pool.find([b"a"]) == []
    assert pool.num_cached == 0


def test_a_shared_block_is_free_only_when_its_last_holder_gives_it_back():
    pool = BlockPool(4, 4)
    (block,) = pool.allocate(1)
    pool.publish(block, b"a")
    pool.share([block])
    pool.release([block])
    assert pool.num_used == 1
    pool.check_integrity([[block]])
    pool.release([block])
    assert pool.num_used == 0


def test_blocks_without_a_known_content_are_reused_before_cached_ones_and_ends_before_beginnings():
    pool = BlockPool(4, 4)
    chain = pool.allocate(3)
    for index, block in enumerate(chain[:2]):
        pool.publish(block, bytes([index]))
    pool.release(chain)
    order = pool.allocate(4)
    assert order[0] == chain[2]
    assert order.index(chain[1]) < order.index(chain[0])


def test_the_least_recently_freed_prefix_goes_first():
    pool = BlockPool(3, 4)
    blocks = pool.allocate(3)
    for index, block in enumerate(blocks):
        pool.publish(block, bytes([index]))
    for block in (blocks[1], blocks[2], blocks[0]):
        pool.release([block])
    pool.share(pool.find([bytes([1])]))
    pool.release([blocks[1]])
    assert pool.allocate(3) == [blocks[2], blocks[0], blocks[1]]


def test_the_first_block_of_a_content_keeps_its_place():
    pool = BlockPool(2, 4)
    first, second = pool.allocate(2)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.find([b"a"]) == [first]
    pool.release([second])
    assert pool.num_cached == 0
    pool.check_integrity([[first]])


def test_publishing_what_nobody_holds_is_an_error():
    with pytest.raises(ValueError, match="not held"):
        BlockPool(2, 4).publish(1, b"a")


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(blocks, size):
    with pytest.raises(ValueError, match="must be >= 1"):
        BlockPool(blocks, size)
