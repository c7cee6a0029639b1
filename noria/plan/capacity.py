"""What a card holds of a model: weights, KV cache, chats at once."""

import math
from dataclasses import dataclass

from noria.plan.cards import Card
from noria.plan.kv import (
    DTYPE_BYTES,
    blocks_of,
    blocks_that_fit,
    host_kv_bytes,
    kv_bytes_per_token,
)
from noria.plan.shape import ModelShape
from noria.plan.units import both_units, exact_bytes

# CUDA graphs of the decode step and the libraries' workspaces. An allowance, not computed:
# servers report 0.2 to 0.6 GiB of graphs and 0.3 to 0.5 GiB outside the allocator.
GPU_WORKSPACE_BYTES = 2**30
# What well-kept kernels reach of a card's dense arithmetic on long prompts. An allowance.
PREFILL_EFFICIENCY = 0.4
# Places in a batch that are suggested where the card's speed is not known.
UNMEASURED_MAX_NUM_SEQS = 256


class DoesNotFitError(ValueError):
    """The model, or one chat of it, needs more memory than there is."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How the model would be run; the names are the worker's.

    `on_kernels`: by the CPU's own kernels, which hold weights in their own way.
    """

    dtype: str
    block_size: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float = 0.9
    workers: int = 1
    kv_cache_memory_bytes: int | None = None
    on_kernels: bool = False


@dataclass(frozen=True, slots=True)
class Capacity:
    """Memory of a card after the model's own. Bytes and tokens.

    usable         what may be taken of the card's memory
    activations    the largest step's intermediate values, at the card's `workspace` aside
    kv_bytes       what is left for keys and values
    """

    shape: ModelShape
    card: Card
    settings: Settings
    usable: int
    weight_bytes: int
    activations: int
    workspace: int
    kv_bytes: int
    kv_bytes_per_token: int
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.settings.block_size

    @property
    def weights_equal_tokens(self) -> int:
        """Tokens in the cache from which on keys and values outweigh the weights."""
        return math.ceil(self.weight_bytes / self.kv_bytes_per_token)

    def chats_at_once(self, num_tokens: int) -> int:
        """Chats of so many tokens, prompt and answer together, that hold their blocks at once."""
        return self.num_blocks // blocks_of(num_tokens, self.settings.block_size)

    def suggested_max_num_seqs(self, num_tokens: int) -> int:
        """Places for chats of that length: as many as fit, but none that no longer pays."""
        return max(1, min(self.chats_at_once(num_tokens), self.paying_batch))

    @property
    def paying_batch(self) -> int:
        """The batch whose arithmetic takes as long as one reading of the weights.

        Below it another sequence shares that reading; above it each adds its own time
        (Williams et al. 2009, the roofline's ridge). 2 operations a parameter and token.
        """
        if self.card.bandwidth is None or self.flops is None:
            return UNMEASURED_MAX_NUM_SEQS
        reading = self.weight_bytes / self.card.bandwidth
        return max(1, int(reading * self.flops / (2 * self.shape.num_parameters)))

    @property
    def flops(self) -> float | None:
        """Operations/s in the model's own type; those of fp32 are not known."""
        return None if self.settings.dtype == "float32" else self.card.flops

    def prefill_tokens_per_s(self, num_tokens: int) -> float | None:
        """Prompt tokens/s at PREFILL_EFFICIENCY of the arithmetic, for prompts of that length.

        2 operations a parameter and token, and 2 a layer, head value and pair of positions
        of which one sees the other, for scores and again for values.
        """
        if self.flops is None:
            return None
        width = self.shape.num_layers * self.shape.num_heads * self.shape.head_dim
        operations = 2 * self.shape.num_parameters + 2 * width * num_tokens
        return PREFILL_EFFICIENCY * self.flops / operations

    def step_floor_s(self, num_seqs: int, num_tokens: int) -> float | None:
        """Seconds of a decode step in which nothing but weights and cache are read, once."""
        if self.card.bandwidth is None:
            return None
        read = self.weight_bytes + num_seqs * num_tokens * self.kv_bytes_per_token
        return read / self.card.bandwidth


def capacity(shape: ModelShape, card: Card, settings: Settings) -> Capacity:
    """Raises DoesNotFitError with what is there and what is missing."""
    itemsize = DTYPE_BYTES[settings.dtype]
    weights = _weight_bytes(shape, settings)
    per_token = kv_bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, itemsize)
    if card.is_host:
        usable, activations, workspace = card.memory // settings.workers, 0, 0
    else:
        usable = int(card.memory * settings.gpu_memory_utilization)
        activations = _activations(shape, itemsize, settings.max_num_batched_tokens)
        workspace = GPU_WORKSPACE_BYTES
    left = usable - weights - activations - workspace
    _check_weights_fit(card, settings, usable, weights, left)
    kv_bytes = left
    if settings.kv_cache_memory_bytes is not None:
        kv_bytes = _checked(settings.kv_cache_memory_bytes, left)
    elif card.is_host:
        kv_bytes = host_kv_bytes(card.memory, weights, settings.workers)
    try:
        num_blocks = blocks_that_fit(per_token, settings.block_size, kv_bytes)
    except ValueError as error:
        raise DoesNotFitError(f"{card.name}: beside the weights, {error}") from error
    return Capacity(
        *(shape, card, settings, usable, weights, activations, workspace),
        *(kv_bytes, per_token, num_blocks),
    )


def _weight_bytes(shape: ModelShape, settings: Settings) -> int:
    if settings.on_kernels and shape.kernel_bytes is not None:
        return shape.kernel_bytes
    return shape.weight_bytes(settings.dtype)


def _activations(shape: ModelShape, itemsize: int, num_positions: int) -> int:
    """Intermediate values of the largest step, in bytes.

    For each position the residual and its normed copy, queries, keys, values and what
    attention returns, both halves of the MLP and their product; and fp32 logits, twice, for
    as many sequences as positions fit a step.
    """
    attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    values = 2 * shape.hidden_size + attention + 3 * shape.intermediate_size
    sampled = min(num_positions, UNMEASURED_MAX_NUM_SEQS)
    return num_positions * values * itemsize + 2 * sampled * shape.vocab_size * 4


def _check_weights_fit(
    card: Card, settings: Settings, usable: int, weights: int, left: int
) -> None:
    if left > 0:
        return
    share = "" if card.is_host else f" (memory x {settings.gpu_memory_utilization:g})"
    raise DoesNotFitError(
        f"{card.name}: the weights in {settings.dtype} take {exact_bytes(weights)}; usable are "
        f"{exact_bytes(usable)}{share}; {both_units(-left)} are missing before any KV cache"
    )


def _checked(given: int, left: int) -> int:
    if given > left:
        raise DoesNotFitError(
            f"kv_cache_memory_bytes is {given:,}; beside the weights {left:,} bytes are left"
        )
    return given
