"""Does a model compute the same with our attention as with its own?

Only then does nothing hide in it that our side would have to honour: a bias on scores, a
soft cap, state carried beside attention, positions taken from elsewhere.
"""

from typing import Any

import torch

from noria.models.config import ConfigError
from worker.attention.base import AttentionMetadata
from worker.attention.reference import ReferenceBackend
from worker.models.transformers_model import TransformersModel

_LENGTH, _BLOCK_SIZE = 6, 4
# By how much of the largest logit both may differ.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


def own_logits(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """fp32 [T, vocab] by the model's own attention."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=token_ids.unsqueeze(0), use_cache=False).logits[0]
    return logits.float()


def probe_ids(vocab_size: int) -> torch.Tensor:
    """A few different ids, int64 [T]."""
    return torch.arange(1, _LENGTH + 1) * 7919 % vocab_size


def check_against_own(model: TransformersModel, own: torch.Tensor, token_ids: torch.Tensor) -> None:
    """The prompt at once, and position by position. Raises ConfigError with the difference."""
    for size, what in ((len(token_ids), "a prompt"), (1, "single positions")):
        ours = _paged_logits(model, token_ids, size)
        difference = float((ours - own).abs().max() / own.abs().max().clamp(min=1e-6))
        if not difference <= _TOLERANCE[model.kv_spec.dtype]:
            raise ConfigError(
                f"with {what} its logits differ by {difference:.1e} of the largest from those "
                "of its own attention: it does something that paged attention does not"
            )


def _paged_logits(model: TransformersModel, token_ids: torch.Tensor, size: int) -> torch.Tensor:
    backend, parts = ReferenceBackend(), []
    backend.allocate(model.kv_spec, 1 + -(-_LENGTH // _BLOCK_SIZE), _BLOCK_SIZE)
    with torch.inference_mode():
        for first in range(0, len(token_ids), size):
            metadata = _metadata(first, min(size, len(token_ids) - first))
            backend.plan(metadata)
            ids = token_ids[first : first + size]
            parts.append(model.logits(model.forward(ids, metadata.positions, backend)))
    return torch.cat(parts)


def _metadata(first: int, count: int) -> AttentionMetadata:
    """One sequence in blocks 1, 2, ..."""
    positions = torch.arange(first, first + count)
    table = torch.arange(1, 1 + -(-_LENGTH // _BLOCK_SIZE), dtype=torch.int32).unsqueeze(0)
    return AttentionMetadata(
        num_decodes=int(count == 1),
        query_start=torch.tensor([0, count], dtype=torch.int32),
        kv_lens=torch.tensor([first + count], dtype=torch.int32),
        block_table=table,
        slot_mapping=_BLOCK_SIZE + positions,
        positions=positions,
        query_start_host=[0, count],
        kv_lens_host=[first + count],
    )
