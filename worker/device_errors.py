"""Errors after which nothing can be computed in this process any more."""

import torch


class DeviceLostError(RuntimeError):
    """The device is out of memory or in an undefined state; says which."""


def lost_device(error: Exception) -> DeviceLostError | None:
    """What an error of a step means for the device; None if it can go on.

    An illegal access poisons the CUDA context: every later call fails. Memory was sized by
    the largest batch, so that running out of it means that somebody else takes it.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceLostError("the device ran out of memory in a step: another process uses it?")
    if isinstance(error, torch.AcceleratorError):
        return DeviceLostError(f"the device failed: {_first_line(error)}")
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
