"""A plan put together: what was asked, what a card holds, what a load needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from noria.plan.capacity import Capacity, DoesNotFitError
from noria.plan.kv import blocks_of
from noria.plan.load import Fleet, Load
from noria.plan.units import exact_bytes

_LENGTHS = (512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 131_072)


@dataclass(frozen=True, slots=True)
class Plan:
    """`chat_len` counts prompt and answer; `chats` were asked to run at once.

    prefill_measured    the load's prefill speed was given, not computed
    max_num_seqs_given  else it is the suggested one, which a load's waits then assume
    """

    model: str
    capacity: Capacity
    chat_len: int
    max_num_seqs: int
    chats: int | None = None
    load: Load | None = None
    fleet: Fleet | None = None
    prefill_measured: bool = True
    max_num_seqs_given: bool = True

    @property
    def lengths(self) -> list[int]:
        """Lengths to show beside `chat_len`: powers of two, and all that the model allows."""
        longest = self.capacity.shape.max_position_embeddings
        return sorted({*(n for n in _LENGTHS if n < longest), self.chat_len, longest})

    @property
    def chats_kv_bytes(self) -> int:
        """Keys and values of the chats that were asked for."""
        return (self.chats or 0) * self.chat_len * self.capacity.kv_bytes_per_token

    @property
    def block_kv_bytes(self) -> int:
        """The same in whole blocks, as the cache holds them."""
        block_size = self.capacity.settings.block_size
        held = blocks_of(self.chat_len, block_size) * block_size
        return (self.chats or 0) * held * self.capacity.kv_bytes_per_token


def check_chats(plan: Plan) -> None:
    """Raises DoesNotFitError with both numbers if the chats asked for, or one, do not fit."""
    held, wanted = plan.capacity.chats_at_once(plan.chat_len), plan.chats or 1
    if wanted > held:
        there = plan.capacity.num_blocks * plan.capacity.settings.block_size
        there *= plan.capacity.kv_bytes_per_token
        needed = max(plan.block_kv_bytes, plan.capacity.kv_bytes_per_token * plan.chat_len)
        raise DoesNotFitError(
            f"{wanted:,} chat{'s' * (wanted > 1)} of {plan.chat_len:,} tokens need "
            f"{exact_bytes(needed)} of KV cache; {plan.capacity.card.name} has room for "
            f"{exact_bytes(there)}: {held:,} at once"
        )


def numbers_of(plan: Plan) -> Mapping[str, Any]:
    """Bytes, tokens, seconds and counts under their names."""
    capacity, shape = plan.capacity, plan.capacity.shape
    told: dict[str, Any] = {
        "model": plan.model,
        "family": shape.family,
        "card": capacity.card.name,
        "dtype": capacity.settings.dtype,
        "num_parameters": shape.num_parameters,
        "weight_bytes": capacity.weight_bytes,
        "kv_bytes_per_token": capacity.kv_bytes_per_token,
        "card_bytes": capacity.card.memory,
        "usable_bytes": capacity.usable,
        "activation_bytes": capacity.activations,
        "workspace_bytes": capacity.workspace,
        "kv_cache_memory_bytes": capacity.kv_bytes,
        "block_size": capacity.settings.block_size,
        "num_blocks": capacity.num_blocks,
        "num_tokens": capacity.num_tokens,
        "max_model_len": shape.max_position_embeddings,
        "chat_len": plan.chat_len,
        "chats_at_once": {str(n): capacity.chats_at_once(n) for n in plan.lengths},
        "suggested_max_num_seqs": capacity.suggested_max_num_seqs(plan.chat_len),
        "max_num_seqs": plan.max_num_seqs,
        "max_num_seqs_given": plan.max_num_seqs_given,
        "kv_outweighs_weights_from_tokens": capacity.weights_equal_tokens,
        "kv_outweighs_weights_from_chat_len": -(
            -capacity.weights_equal_tokens // plan.max_num_seqs
        ),
        "decode_step_floor_s": capacity.step_floor_s(plan.max_num_seqs, plan.chat_len),
        "window": shape.window,
        "num_windowed_layers": shape.num_windowed_layers,
    }
    if plan.chats is not None:
        told |= {"chats": plan.chats, "chats_kv_bytes": plan.chats_kv_bytes}
    if plan.load is not None and plan.fleet is not None:
        told["load"] = _load(plan.load, plan.fleet, plan.prefill_measured)
    return told


def _load(load: Load, fleet: Fleet, measured: bool) -> Mapping[str, Any]:
    told: dict[str, Any] = {
        "request_rate": load.request_rate,
        "input_len": load.input_len,
        "output_len": load.output_len,
        "tokens_per_s": load.tokens_per_s,
        "prefill_tokens_per_s": load.prefill_tokens_per_s,
        "prefill_tokens_per_s_measured": measured,
        "target_utilization": load.utilization,
        "decode_tokens_per_s": fleet.decode_tokens_per_s,
        "replicas_at_full_load": fleet.at_full_load,
        "replicas": fleet.replicas,
        "utilization": fleet.utilization,
        "in_flight_per_replica": fleet.in_flight,
        "prefill_replicas": fleet.prefill_replicas or None,
        "ttft": None,
    }
    if fleet.ttft is not None:
        told["ttft"] = {
            "place_s": fleet.ttft.place_s,
            "prefill_queue_s": fleet.ttft.prefill_queue_s,
            "prefill_s": fleet.ttft.prefill_s,
            "total_s": fleet.ttft.total_s,
            "prefill_busy": fleet.ttft.busy,
        }
    return told
