"""Rows of keys and values in the dtypes that loops read: float32, and bfloat16 as the 16 bits it is."""

import numba
import numpy as np
from numba.extending import overload


def as_float(number):
    """A float32 as it is, and a bfloat16, given as its bits (uint16), as the float32 it is; in compiled code only."""
    raise NotImplementedError("only compiled loops call it")


@overload(as_float, inline="always")
def _as_float(number):
    if isinstance(number, numba.types.Integer):
        return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)
    return lambda number: number
