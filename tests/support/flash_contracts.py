"""In FlashAttention's place on a CPU: each function refuses what the real one would refuse, or
would get wrong, and computes the rest by attention's definition.
"""

import torch

_INT32 = torch.int32


class ContractError(RuntimeError):
    """A call that the real function refuses, or answers wrongly without a word."""


def require(condition, broken):
    if not condition:
        raise ContractError(broken)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """FlashAttention 2, from 2.8.3 on."""
    _check_tensors(q, k, v)
    require(k.shape[1] % 256 == 0, "blocks are no multiple of 256")
    _check_indices(cu_seqlens_q, "cu_seqlens_q")
    _check_indices(cu_seqlens_k, "cu_seqlens_k")
    _check_table(block_table)
    require(len(cu_seqlens_k) == len(cu_seqlens_q), "cu_seqlens_k has another length")
    require(causal, "not causal")
    lens = cu_seqlens_k.diff()
    _check_longest(cu_seqlens_q.diff(), max_seqlen_q, "max_seqlen_q")
    _check_longest(lens, max_seqlen_k, "max_seqlen_k")
    left = _left(window_size)
    return _attended(q, k, v, cu_seqlens_q, lens, block_table, softmax_scale, left)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, page_table=None, cu_seqlens_q=None,
    cu_seqlens_k_new=None, max_seqlen_q=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, scheduler_metadata=None, num_splits=0, pack_gqa=None,
    cu_seqlens_k=None,
):  # fmt: skip
    """FlashAttention 3; blocks of any size."""
    _check_tensors(q, k_cache, v_cache)
    require(k is None and v is None, "an append is declared as no write")
    require(cu_seqlens_k is None, "cu_seqlens_k beside a page table")
    _check_indices(cu_seqlens_q, "cu_seqlens_q")
    _check_indices(cache_seqlens, "cache_seqlens")
    _check_table(page_table)
    require(len(cache_seqlens) == len(cu_seqlens_q) - 1, "cache_seqlens has another length")
    require(max_seqlen_q is not None, "max_seqlen_q is missing")
    require(causal, "not causal")
    _check_longest(cu_seqlens_q.diff(), max_seqlen_q, "max_seqlen_q")
    if max_seqlen_q == 1:
        require(0 < num_splits <= 128, "a graph would keep the splits of the longest context")
    else:
        require(num_splits < 2, "partial results of every position of a prompt")
    left = _left(window_size)
    return _attended(
        q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, left
    )


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """torch.nn.attention.varlen.varlen_attn on its FlashAttention 2."""
    _check_tensors(query, key, value)
    require(key.shape[1] % 256 == 0, "blocks are no multiple of 256")
    _check_indices(cu_seq_q, "cu_seq_q")
    require(cu_seq_k is not None, "cu_seq_k is missing")
    _check_indices(cu_seq_k, "cu_seq_k")
    require(len(cu_seq_k) == len(cu_seq_q), "cu_seq_k has another length")
    require(seqused_k is not None, "seqused_k is missing beside a block table")
    _check_indices(seqused_k, "seqused_k")
    _check_table(block_table)
    require(enable_gqa or query.shape[1] == key.shape[2], "enable_gqa is off")
    require(isinstance(window_size, tuple), "window_size is no tuple: it would not be causal")
    require(window_size[1] == 0, "not causal")
    require(num_splits == 1, "with splits, rows stay unwritten")
    _check_longest(cu_seq_q.diff(), max_q, "max_q")
    _check_longest(seqused_k, max_k, "max_k")
    left = None if window_size[0] < 0 else window_size[0]
    return _attended(query, key, value, cu_seq_q, seqused_k, block_table, scale, left)


def _check_tensors(query, keys, values):
    require(query.dtype in (torch.float16, torch.bfloat16), "neither float16 nor bfloat16")
    require(keys.dtype is query.dtype and values.dtype is query.dtype, "K or V of another dtype")
    require(query.shape[-1] % 8 == 0, "head_dim is no multiple of 8")
    require(query.shape[-1] <= 256, "head_dim is above 256")
    require(query.shape[1] % keys.shape[2] == 0, "heads are no multiple of KV heads")
    for tensor in (query, keys, values):
        require(tensor.stride(-1) == 1, "the last dimension is not contiguous")


def _check_indices(tensor, name):
    require(tensor.dtype is _INT32, f"{name} is not int32")
    require(tensor.is_contiguous(), f"{name} is not contiguous")
    require(len(tensor) > (1 if "cu_" in name else 0), "no sequence at all")


def _check_table(table):
    require(table is not None, "the block table is missing")
    require(table.dtype is _INT32, "the block table is not int32")
    require(table.stride(-1) == 1, "the block table's last dimension is not contiguous")


def _check_longest(lens, longest, name):
    require(isinstance(longest, int), f"{name} is no number of the host's")
    require(longest >= int(lens.max()), f"{name} is below the longest")


def _left(window_size):
    """Keys left of its own that a causal query sees; None: all."""
    require(window_size in ((-1, -1), (-1, 0)) or window_size[1] == 0, "a window to the right")
    return None if window_size[0] < 0 else window_size[0]


def _attended(query, keys, values, starts, lens, table, scale, left):
    """In fp32, rows aligned to the last key; zeros for a sequence without keys."""
    attended = torch.zeros_like(query)
    group = query.shape[1] // keys.shape[2]
    for sequence, kv_len in enumerate(lens.tolist()):
        start, end = starts[sequence : sequence + 2].tolist()
        if start == end or not kv_len:
            continue
        row = torch.arange(kv_len - (end - start), kv_len).unsqueeze(1)
        first = 0 if left is None else max(0, int(row[0]) - left)
        position = torch.arange(first, kv_len)
        places = table[sequence][position // keys.shape[1]].long(), position % keys.shape[1]
        key, value = (cache[places].float().repeat_interleave(group, 1) for cache in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), key) * scale
        hidden = position > row
        if left is not None:
            hidden |= position < row - left
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        attended[start:end] = torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
    return attended
