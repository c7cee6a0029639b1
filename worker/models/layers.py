"""Operations that model families share. Packed positions: [T, ...], no batch axis."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of one step's angles, fp32 [T, 1, head_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotation(
    positions: torch.Tensor, frequencies: torch.Tensor, magnitude: float = 1.0
) -> Rotation:
    """positions int64 [T], frequencies fp32 [head_dim / 2]."""
    angles = (positions.float().unsqueeze(1) * frequencies).unsqueeze(1)
    if magnitude == 1.0:
        return Rotation(angles.cos(), angles.sin())
    return Rotation(angles.cos() * magnitude, angles.sin() * magnitude)


def rotate(heads: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Rotary embedding (Su et al. 2021) of heads [T, N, head_dim], computed in fp32.

    Pairs are (i, i + head_dim / 2), the order of Hugging Face checkpoints.
    """
    first, second = heads.float().chunk(2, dim=-1)
    rotated = torch.empty(heads.shape, dtype=torch.float32, device=heads.device)
    half = heads.shape[-1] // 2
    torch.sub(first * by.cos, second * by.sin, out=rotated[..., :half])
    torch.add(second * by.cos, first * by.sin, out=rotated[..., half:])
    return rotated.to(heads.dtype)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Zhang and Sennrich 2019: hidden [..., H] over its root mean square, times weight [H].

    Computed in the weight's dtype, given back in hidden's.
    """
    return F.rms_norm(hidden.to(weight.dtype), weight.shape, weight, eps).to(hidden.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2I] -> [T, I]: SiLU of the first half times the second (SwiGLU, Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2I] -> [T, I]: GELU (by tanh) of the first half times the second (GeGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Bends logits smoothly into (-cap, cap) (Bello et al. 2016)."""
    return torch.tanh(logits / cap).mul_(cap)
