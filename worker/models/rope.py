"""Frequencies of the rotary embedding, and how longer contexts stretch them."""

import math

import torch

from noria.models.rope import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    Scaling,
    YarnScaling,
)


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """fp32 [head_dim / 2]: theta^(-2i / head_dim), scaled."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponents
    return plain if rope.scaling is None else _scaled(plain, rope.scaling, rope.theta)


def _scaled(plain: torch.Tensor, scaling: Scaling, theta: float) -> torch.Tensor:
    match scaling:
        case LinearScaling():
            return plain / scaling.factor
        case Llama3Scaling():
            return _llama3(plain, scaling)
        case FactorScaling():
            return plain / torch.tensor(scaling.factors, dtype=plain.dtype)
        case YarnScaling():
            return _yarn(plain, scaling, theta)


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_length * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: torch.Tensor, scaling: YarnScaling, theta: float) -> torch.Tensor:
    """The ramp between kept and divided is linear in the frequency's index, from whole to whole."""
    count = len(plain)

    def index_of(turns: float) -> float:
        wavelength = scaling.original_length / (turns * 2 * math.pi)
        return count * math.log(wavelength) / math.log(theta)

    first = max(math.floor(index_of(scaling.beta_fast)), 0)
    last = min(math.ceil(index_of(scaling.beta_slow)), 2 * count - 1)
    width = last - first or 0.001
    divided = ((torch.arange(count, dtype=torch.float32) - first) / width).clamp(0, 1)
    return plain / scaling.factor * divided + plain * (1 - divided)
