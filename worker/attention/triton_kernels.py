"""Paged attention in Triton: flash attention over block tables (Dao 2023), split for decoding.

A program owns a tile of rows: consecutive positions of one sequence times the GROUP query
heads that share a KV head, so that a key is loaded once for all of them. Softmax is online,
in base 2 and fp32. K and V are read at table[position // BLOCK], offset position % BLOCK.

Interpreted on a CPU, products of bfloat16 would be products of their bit patterns: UPCAST.
"""

import triton
import triton.language as tl


@triton.jit
def split_size(seen, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """As worker.attention.triton_tiles.split_size: decided by the row's own keys alone."""
    return SPLIT * tl.maximum(1, tl.cdiv(seen, SPLIT * MAX_SPLITS))


@triton.jit
def first_tile(sequence, starts, first, POSITIONS: tl.constexpr):
    """The number of a sequence's first tile, when each may leave its last one unused."""
    begins = tl.load(starts + sequence) - tl.load(starts + first)
    return begins // POSITIONS + sequence - first


@triton.jit
def sequence_of(tile, starts, first, end, POSITIONS: tl.constexpr):
    """Among the sequences [first, end), the last whose tiles begin at or before `tile`."""
    low, high = first, end
    while high - low > 1:
        middle = (low + high) // 2
        before = first_tile(middle, starts, first, POSITIONS) <= tile
        low, high = tl.where(before, middle, low), tl.where(before, high, middle)
    return low


@triton.jit
def over_keys(
    attended, top, total, query, keys, values, table, first, end, own, window, scale,
    block_stride, slot_stride,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Keys [first, end) for rows at positions `own`; unmasked, all rows see whole tiles of them."""
    column, lane = tl.arange(0, KEYS), tl.arange(0, WIDTH)
    for start in range(first, end, KEYS):
        position = start + column
        if MASKED:
            block = tl.load(table + position // BLOCK, mask=position < end, other=0)
        else:
            block = tl.load(table + position // BLOCK)
        place = block.to(tl.int64) * block_stride + (position % BLOCK) * slot_stride
        offset = place[:, None] + lane[None, :]
        if MASKED:
            # What lies beyond is not multiplied, not even by zero: it may be NaN.
            there = (position < end)[:, None] & (lane < HEAD_DIM)[None, :]
            key = tl.load(keys + offset, mask=there, other=0.0)
            value = tl.load(values + offset, mask=there, other=0.0)
        elif HEAD_DIM < WIDTH:
            there = tl.broadcast_to((lane < HEAD_DIM)[None, :], (KEYS, WIDTH))
            key = tl.load(keys + offset, mask=there, other=0.0)
            value = tl.load(values + offset, mask=there, other=0.0)
        else:
            key = tl.load(keys + offset)
            value = tl.load(values + offset)
        if UPCAST:
            key, value = key.to(tl.float32), value.to(tl.float32)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if MASKED:
            seen = (position < end)[None, :] & (position[None, :] <= own[:, None])
            if WINDOWED:
                seen = seen & (position[None, :] > own[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = higher
        if MASKED:
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 1)
        attended = attended * shrink[:, None]
        attended = tl.dot(weight.to(value.dtype), value, attended, input_precision="ieee")
        top = higher
    return attended, top, total


# Numbers that change from step to step: a kernel of their own for each that happens to be 1, or a
# multiple of 16, would be compiled while somebody waits.
@triton.jit(do_not_specialize=["first", "end", "table_stride"])
def attention_kernel(
    query, keys, values, out, sizes, starts, kv_lens, tables, first, end, window, scale,
    query_row, query_head, block_stride, head_stride, slot_stride,
    out_split, out_row, out_head, sizes_split, sizes_row, table_stride,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DECODE: tl.constexpr, PARTIAL: tl.constexpr,
    WINDOWED: tl.constexpr, UPCAST: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid (sequences, KV heads, splits) to decode, else (tiles, KV heads, 1).

    query and out [T, heads, HEAD_DIM]; keys and values one layer's cache; tables int32, a row
    per sequence. Sequences [first, end) of the step are meant. To decode, each has the single
    position of its own number. PARTIAL: out fp32 [splits, T, heads, HEAD_DIM] with the base-2
    logarithm of each split's weight in sizes [splits, T, heads], for `combine_kernel`.
    """
    POSITIONS: tl.constexpr = ROWS // GROUP
    head, split = tl.program_id(1), tl.program_id(2)
    if DECODE:
        sequence = first + tl.program_id(0)
        ahead = 0
        begin = sequence
        count = 1
    else:
        tile = tl.program_id(0)
        sequence = sequence_of(tile, starts, first, end, POSITIONS)
        ahead = (tile - first_tile(sequence, starts, first, POSITIONS)) * POSITIONS
        begin = tl.load(starts + sequence)
        count = tl.load(starts + sequence + 1) - begin
    if ahead >= count:
        return
    kv_len = tl.load(kv_lens + sequence)
    prefix = kv_len - count
    row, lane = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    ahead_of = ahead + row // GROUP
    query_head_of = head * GROUP + row % GROUP
    real = (ahead_of < count) & (row < POSITIONS * GROUP)
    stored = real[:, None] & (lane < HEAD_DIM)[None, :]
    begin = begin.to(tl.int64)
    rows = query + (begin + ahead_of)[:, None] * query_row + query_head_of[:, None] * query_head
    loaded = tl.load(rows + lane[None, :], mask=stored, other=0.0)
    if UPCAST:
        loaded = loaded.to(tl.float32)

    visible = kv_len
    if not DECODE:
        visible = tl.minimum(ahead + POSITIONS + prefix, kv_len)
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(prefix + ahead + 1 - window, 0)
    if DECODE:
        size = split_size(visible - lowest, SPLIT, MAX_SPLITS)
        lowest = lowest + split * size
        visible = tl.minimum(lowest + size, visible)
        if (lowest >= visible) & (split > 0):
            return
    keys += head.to(tl.int64) * head_stride
    values += head.to(tl.int64) * head_stride
    table = tables + sequence.to(tl.int64) * table_stride
    own = prefix + ahead_of
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, WIDTH], tl.float32)
    whole = lowest
    if not WINDOWED:
        # Below the tile's first position every row sees every key.
        unmasked = tl.minimum(prefix + ahead + 1, visible) - lowest
        whole = lowest + tl.maximum(unmasked, 0) // KEYS * KEYS
        attended, top, total = over_keys(
            attended, top, total, loaded, keys, values, table, lowest, whole, own, window, scale,
            block_stride, slot_stride,
            BLOCK, HEAD_DIM, WIDTH, KEYS, False, False, UPCAST,
        )  # fmt: skip
    attended, top, total = over_keys(
        attended, top, total, loaded, keys, values, table, whole, visible, own, window, scale,
        block_stride, slot_stride,
        BLOCK, HEAD_DIM, WIDTH, KEYS, True, WINDOWED, UPCAST,
    )  # fmt: skip
    attended = attended / tl.where(total > 0, total, 1.0)[:, None]
    written = out + (begin + ahead_of)[:, None] * out_row + query_head_of[:, None] * out_head
    if PARTIAL:
        written += split.to(tl.int64) * out_split
        size = top + tl.log2(tl.where(total > 0, total, 1.0))
        at = split.to(tl.int64) * sizes_split + (begin + ahead_of) * sizes_row + query_head_of
        tl.store(sizes + at, size, mask=real)
    tl.store(written + lane[None, :], attended.to(out.dtype.element_ty), mask=stored)


@triton.jit
def combine_kernel(
    partial, sizes, out, kv_lens, window,
    partial_split, partial_row, partial_head, sizes_split, sizes_row, out_row, out_head,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOWED: tl.constexpr,
    SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid (decoding sequences, heads): the splits of a row into one, by their weights."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seen = tl.load(kv_lens + row)
    if WINDOWED:
        seen = tl.minimum(seen, window)
    count = tl.cdiv(seen, split_size(seen, SPLIT, MAX_SPLITS))
    split, lane = tl.arange(0, MAX_SPLITS), tl.arange(0, WIDTH)
    at = split.to(tl.int64)
    size = tl.load(
        sizes + at * sizes_split + row * sizes_row + head, mask=split < count, other=float("-inf")
    )
    highest = tl.max(size, 0)
    weight = tl.exp2(size - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total > 0, total, 1.0)
    places = at[:, None] * partial_split + row * partial_row + head * partial_head + lane[None, :]
    there = (split < count)[:, None] & (lane < HEAD_DIM)[None, :]
    parts = tl.load(partial + places, mask=there, other=0.0)
    attended = tl.sum(parts * weight[:, None], 0).to(out.dtype.element_ty)
    tl.store(out + row * out_row + head * out_head + lane, attended, mask=lane < HEAD_DIM)


@triton.jit(do_not_specialize=["count"])
def write_kernel(
    key, value, keys, values, slots, count,
    key_row, key_head, value_row, value_head, block_stride, head_stride, slot_stride,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of ROWS positions, KV heads): key and value to their slot; below 0 is none."""
    row, head = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    lane = tl.arange(0, WIDTH)
    slot = tl.load(slots + row, mask=row < count, other=-1)
    there = (slot >= 0)[:, None] & (lane < HEAD_DIM)[None, :]
    place = slot // BLOCK * block_stride + head * head_stride + slot % BLOCK * slot_stride
    places = place[:, None] + lane[None, :]
    taken = tl.load(key + (row * key_row + head * key_head)[:, None] + lane[None, :], mask=there)
    tl.store(keys + places, taken, mask=there)
    read = value + (row * value_row + head * value_head)[:, None] + lane[None, :]
    tl.store(values + places, tl.load(read, mask=there), mask=there)


@triton.jit
def rotate_and_write_kernel(
    heads, value, rotated, keys, values, slots, cos, sin, num_heads,
    heads_row, heads_head, value_row, value_head, rotated_row, rotated_head, angle_row,
    block_stride, head_stride, slot_stride,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, HALF_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (positions, KV heads): rotary embedding of GROUP query heads and of their key.

    heads [T, num_heads + KV heads, HEAD_DIM]: the queries' and then the keys'; pairs are
    (i, i + HALF), angles' cos and sin fp32 [T, HALF]. Queries go to `rotated`, key and value
    to their slot. MEMBERS is a power of two above GROUP.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    member, lane = tl.arange(0, MEMBERS), tl.arange(0, HALF_WIDTH)
    own = tl.where(member < GROUP, head * GROUP + member, num_heads + head)
    there = (member <= GROUP)[:, None] & (lane < HALF)[None, :]
    angles = row * angle_row + lane
    cosine = tl.load(cos + angles, mask=lane < HALF, other=0.0)[None, :]
    sine = tl.load(sin + angles, mask=lane < HALF, other=0.0)[None, :]
    places = heads + row * heads_row + own[:, None] * heads_head + lane[None, :]
    first = tl.load(places, mask=there, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=there, other=0.0).to(tl.float32)
    kind = rotated.dtype.element_ty
    turned_first = (first * cosine - second * sine).to(kind)
    turned_second = (second * cosine + first * sine).to(kind)
    queries = there & (member < GROUP)[:, None]
    places = rotated + row * rotated_row + own[:, None] * rotated_head + lane[None, :]
    tl.store(places, turned_first, mask=queries)
    tl.store(places + HALF, turned_second, mask=queries)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    place = slot // BLOCK * block_stride + head * head_stride + slot % BLOCK * slot_stride
    is_key = there & (member == GROUP)[:, None]
    places = keys + place + lane[None, :] + tl.zeros([MEMBERS, 1], tl.int64)
    tl.store(places, turned_first, mask=is_key)
    tl.store(places + HALF, turned_second, mask=is_key)
    whole = tl.arange(0, WIDTH)
    taken = tl.load(value + row * value_row + head * value_head + whole, mask=whole < HEAD_DIM)
    tl.store(values + place + whole, taken, mask=whole < HEAD_DIM)
