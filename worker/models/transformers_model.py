"""Any decoder-only model of `transformers`, through its own modelling code.

Its attention function is replaced by one that writes to and reads from our paged cache;
everything else (embeddings, positions, norms, MLPs, head) is its own.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from noria.models.config import ConfigError
from worker.attention.base import AttentionBackend, KVCacheSpec

IMPLEMENTATION = "noria"
# Arguments of attention functions that change nothing here, whatever their value.
_HARMLESS = frozenset(
    (
        "cache_position",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    )
)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks of attention: see KVCacheSpec and AttentionBackend.attend."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    window: int | None


class AttentionHook:
    """Stands between a model's layers and the backend of the step that runs.

    Without a backend it only notes the calls and answers zeros.
    """

    def __init__(self) -> None:
        self.backend: AttentionBackend | None = None
        self.calls: list[AttentionCall] = []

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Heads first, [1, N, T, head_dim], as transformers has them; gives [1, T, N, head_dim]."""
        if self.backend is None:
            self.calls.append(call)
            return torch.zeros_like(query).transpose(1, 2)
        self.backend.write_kv(call.layer, _packed(key), _packed(value))
        attended = self.backend.attend(call.layer, _packed(query), call.scale, call.window)
        return attended.unsqueeze(0)


def _packed(heads: torch.Tensor) -> torch.Tensor:
    return heads[0].transpose(0, 1).contiguous()


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function as `transformers.AttentionInterface` registers them.

    Raises ConfigError naming what the layer asks for and the backends do not do.
    """
    asked = {k: v for k, v in others.items() if v is not None and k not in _HARMLESS}
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        asked["is_causal"] = False
    if attention_mask is not None:
        asked["attention_mask"] = attention_mask
    if value.shape != key.shape:
        asked["value heads"] = tuple(value.shape[1:])
    if asked:
        told = ", ".join(f"{k} = {_told(v)}" for k, v in asked.items())
        raise ConfigError(f"{type(module).__name__} asks of attention: {told}: not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    call = AttentionCall(
        module.layer_idx, query.shape[1], key.shape[1], key.shape[3], key.dtype, scale,
        sliding_window,
    )  # fmt: skip
    return module.noria_attention.attend(call, query, key, value), None


def _told(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)[:80]


class _GivenHidden(torch.nn.Module):
    """In the place of a model's body: answers the hidden states it is given.

    `output` is the class of what the body answers.
    """

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output
        self.hidden = torch.empty(0)

    @property
    def decoder(self) -> "_GivenHidden":
        """OPT's head asks its body for this."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output(last_hidden_state=self.hidden.unsqueeze(0))


class TransformersModel:
    """A `transformers` causal language model whose attention goes through our backends.

    Hidden states come from the model's body; logits from the whole model around a body that
    answers the hidden states it is given, so that whatever it does to logits is done.
    """

    def __init__(self, model: Any) -> None:
        """`model` is switched to our attention. Raises ConfigError for one that cannot be."""
        transformers: Any = import_module("transformers")
        transformers.AttentionInterface.register(IMPLEMENTATION, paged_attention)
        self._hook = AttentionHook()
        for module in model.modules():
            module.noria_attention = self._hook
        model.set_attn_implementation(IMPLEMENTATION)
        self._body = model.base_model
        with torch.inference_mode():
            output = self._answer(torch.tensor([0]), torch.tensor([0]))
        self.calls = _checked(self._hook.calls)
        self._given = _GivenHidden(type(output))
        self._head = _around(model, self._given)
        first = self.calls[0]
        self.kv_spec = KVCacheSpec(len(self.calls), first.num_kv_heads, first.head_dim, first.dtype)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        self._hook.backend = attention
        hidden: torch.Tensor = self._answer(token_ids, positions).last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._given.hidden = hidden
        output = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False)
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _answer(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        return self._body(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
        )


def _checked(calls: list[AttentionCall]) -> list[AttentionCall]:
    """What each layer asks for, in order: all of them once, with K and V of one shape."""
    if not calls:
        raise ConfigError("its attention cannot be replaced: it does not use the interface")
    layers = [call.layer for call in calls]
    if layers != list(range(len(calls))):
        raise ConfigError(f"its layers attend in the order {layers}, not once each")
    shapes = {(call.num_kv_heads, call.head_dim, call.dtype) for call in calls}
    if len(shapes) > 1:
        raise ConfigError(f"its layers keep K and V of different shapes: {shapes}")
    return calls


def _around(model: Any, body: torch.nn.Module) -> Any:
    """The same model, sharing its weights, with another body."""
    shell = object.__new__(type(model))
    shell.__dict__.update(model.__dict__)
    shell._modules = {**model._modules, model.base_model_prefix: body}
    return shell
