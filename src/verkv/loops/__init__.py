"""Loops over tokens that numba compiles, for a pass over a sealed layer on a CPU.

Importing a module of this folder needs numba, so what calls them imports it only then:
:mod:`verkv.estimators.compiled_plan`, :mod:`verkv.compiled_attention` and :mod:`verkv.compiled_step`. numba keeps on
disk what it has compiled, and compiles anew when a file has changed. It does not notice changes in another file, so no
loop calls one of another file, but for ``as_float`` of ``rows``. Assignments to slices are written out: each would take
a second to compile.
"""

from collections.abc import Callable


def compiled(function: Callable | None = None, *, any_order: bool = False) -> Callable:
    """Compile a loop at its first call; a decorator. It runs without the interpreter's lock.

    Parameters
    ----------
    function : callable
    any_order : bool
        Sums may be taken in any order, as any matrix product takes them.

    Returns
    -------
    callable
    """
    import numba

    if function is None:
        return lambda function: compiled(function, any_order=any_order)
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract"} if any_order else False}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # there is no folder that can be written to: every process compiles for itself
        return numba.njit(**options)(function)
