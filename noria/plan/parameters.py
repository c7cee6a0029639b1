"""How many parameters each family of models has, from its sizes alone."""

from dataclasses import dataclass

from noria.plan.shape import Count


@dataclass(frozen=True, slots=True)
class GatedSizes:
    """A decoder with RMSNorm, grouped query heads and a gated MLP: Llama and its relatives.

    q_bias          of the query, key and value projections
    out_bias        of the attention's output projection
    qk_norm         a norm of one head's size each for queries and keys
    num_norms       norms of the hidden size in each layer
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    q_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_norms: int = 2


def gated_parameters(sizes: GatedSizes) -> tuple[Count, ...]:
    """Embedding, layers, last norm, and the output matrix if it is one of its own."""
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    q_size, kv_size = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    attention = hidden * (q_size + 2 * kv_size) + q_size * hidden
    attention += sizes.q_bias * (q_size + 2 * kv_size) + sizes.out_bias * hidden
    mlp = 3 * hidden * inner + sizes.mlp_bias * (2 * inner + hidden)
    norms = sizes.num_norms * hidden + sizes.qk_norm * 2 * sizes.head_dim
    counts = [
        _embedding(sizes.vocab_size, hidden),
        _layers(sizes.num_layers, attention, mlp, norms),
        Count("last norm", hidden),
    ]
    if not sizes.tied:
        counts.append(_matrix("output matrix", sizes.vocab_size, hidden))
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class PlainSizes:
    """A decoder with LayerNorm, learned positions and a plain MLP: GPT-2 and OPT.

    embedding_size    of a token before it is projected to `hidden_size`
    num_positions     rows of the position embedding
    bias              of all projections
    norm_affine       norms have a weight and a bias
    last_norm         there is a norm after the last layer
    """

    vocab_size: int
    embedding_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_positions: int
    tied: bool
    bias: bool = True
    norm_affine: bool = True
    last_norm: bool = True


def plain_parameters(sizes: PlainSizes) -> tuple[Count, ...]:
    """Embeddings, layers, last norm, and matrices around them where there are any."""
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    norm = 2 * hidden * sizes.norm_affine
    attention = 4 * (hidden * hidden + sizes.bias * hidden)
    mlp = 2 * hidden * inner + sizes.bias * (inner + hidden)
    counts = [
        _embedding(sizes.vocab_size, sizes.embedding_size),
        _matrix("position embedding", sizes.num_positions, hidden),
        _layers(sizes.num_layers, attention, mlp, 2 * norm),
    ]
    if sizes.embedding_size != hidden:
        counts.append(_matrix("projections in and out", 2 * sizes.embedding_size, hidden))
    if sizes.last_norm:
        counts.append(Count("last norm", norm))
    if not sizes.tied:
        counts.append(_matrix("output matrix", sizes.vocab_size, sizes.embedding_size))
    return tuple(counts)


def _embedding(vocab_size: int, size: int) -> Count:
    return _matrix("token embedding", vocab_size, size)


def _matrix(name: str, rows: int, columns: int) -> Count:
    return Count(f"{name} {rows:,} x {columns:,}", rows * columns)


def _layers(num_layers: int, attention: int, mlp: int, norms: int) -> Count:
    words = f"{num_layers} layers x (attention {attention:,} + MLP {mlp:,} + norms {norms:,})"
    return Count(words, num_layers * (attention + mlp + norms))
