"""Errors after which nothing can be computed in this process any more."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from worker.flights import DeviceLostError


@contextmanager
def telling_lost_device(doing: str) -> Iterator[None]:
    """Raises DeviceLostError in the place of what says that the device cannot go on.

    An illegal access poisons the CUDA context: every later call fails. Memory was sized by
    the largest batch, so that to run out of it means that somebody else takes it.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceLostError(f"out of memory {doing}: {_first_line(error)}") from error
    except torch.AcceleratorError as error:
        raise DeviceLostError(f"the device failed {doing}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """Sizes or the kind of fault, and no tensor's content."""
    return str(error).strip().partition("\n")[0]
