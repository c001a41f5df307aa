"""Times of the single CUDA kernels, where there is a GPU and the CUDA module offers them."""

import importlib

from verkv.bench.settings import BenchSettings, BenchSkipped
from verkv.bench.timing import Comparison


def run(settings: BenchSettings) -> list[Comparison]:
    """Ask ``verkv.cuda.bench``, if it is there: ``run(settings)`` returns comparisons, ceilings among their facts.

    Parameters
    ----------
    settings : BenchSettings

    Returns
    -------
    list of Comparison

    Raises
    ------
    BenchSkipped
        If there is no GPU, or no such module.
    """
    if settings.torch_device.type != "cuda":
        raise BenchSkipped("needs a CUDA device")
    try:
        module = importlib.import_module("verkv.cuda.bench")
    except ModuleNotFoundError as error:
        raise BenchSkipped("verkv.cuda does not time its kernels") from error
    return module.run(settings)
