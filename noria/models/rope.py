"""Rotary embedding (Su et al. 2021) as configs describe it; the worker computes with it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency is divided by `factor` (position interpolation, Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long waves are slowed by `factor`, short ones kept, those between blended (Llama 3.1).

    Wavelengths are told long from short by `original_length` tokens over the two factors.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """Each frequency is divided by a factor of its own, as GGUF files list them."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023), for contexts `factor` times `original_length` tokens.

    Frequencies that turn less than `beta_slow` times within `original_length` are divided by
    `factor`, those that turn more than `beta_fast` times kept, those between blended.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


Scaling = LinearScaling | Llama3Scaling | FactorScaling | YarnScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of base `theta`; cosines and sines are multiplied by `magnitude`."""

    theta: float = 10000.0
    scaling: Scaling | None = None
    magnitude: float = 1.0
