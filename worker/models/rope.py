"""Frequencies of the rotary embedding, and how longer contexts stretch them."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency is divided by `factor` (position interpolation, Chen et al. 2023)."""

    factor: float

    def apply(self, frequencies: torch.Tensor) -> torch.Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long waves are slowed by `factor`, short ones kept, those between blended (Llama 3.1).

    Wavelengths are told long from short by `original_length` tokens over the two factors.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def apply(self, frequencies: torch.Tensor) -> torch.Tensor:
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_length * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """Each frequency is divided by a factor of its own, as GGUF files list them."""

    factors: tuple[float, ...]

    def apply(self, frequencies: torch.Tensor) -> torch.Tensor:
        return frequencies / torch.tensor(self.factors, dtype=frequencies.dtype)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding (Su et al. 2021) of base `theta`."""

    theta: float = 10000.0
    scaling: LinearScaling | Llama3Scaling | FactorScaling | None = None

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """fp32 [head_dim / 2]: theta^(-2i / head_dim), scaled."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / self.theta**exponents
        return frequencies if self.scaling is None else self.scaling.apply(frequencies)
