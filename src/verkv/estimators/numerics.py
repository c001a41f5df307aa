"""Precision in which sums over tokens are taken."""

import torch
from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """float16 and bfloat16 as float32: a sum over thousands of tokens needs more than 11 bits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
