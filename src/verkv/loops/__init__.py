"""Loops over tokens that numba compiles, for a pass over a sealed layer on a CPU.

Importing a module of this folder needs numba, so what calls them goes through :func:`load`:
:mod:`verkv.estimators.compiled_plan`, :mod:`verkv.compiled_attention` and :mod:`verkv.compiled_step`. numba keeps on
disk what it has compiled, and compiles anew when a file has changed. It does not notice changes in another file, or in
the options of :func:`compiled`, so no loop calls one of another file, but for ``as_float`` of ``rows``. Assignments to
slices are written out: each would take a second to compile.
"""

import functools
import importlib
import threading
import warnings
from collections.abc import Callable

MODULES = ("attention", "plan", "step")

_keeps_compiled = True  # on disk
_COMPILING = threading.Lock()


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
        return numba.njit(cache=_keeps_compiled, **options)(function)
    except RuntimeError:  # there is no folder that can be written to: every process compiles for itself
        return numba.njit(**options)(function)


@functools.cache
def load() -> dict[str, "Loops"] | None:
    """The loops of each module; None where numba is missing, forbidden, or cannot be used (the last with a warning)."""
    try:
        import numba

        if numba.config.DISABLE_JIT:
            return None
        for name in MODULES:
            importlib.import_module(f"verkv.loops.{name}")
    except Exception as error:  # say, a numpy that this numba does not know
        if not (isinstance(error, ModuleNotFoundError) and error.name == "numba"):
            warnings.warn(f"numba is installed but cannot be used ({error}): torch plans, more slowly", stacklevel=2)
        return None
    return {name: Loops(name) for name in MODULES}


class Loops:
    """The loops of a module, as attributes.

    What numba keeps on disk may be damaged, or the disk full: such an error comes before a loop has run. All are then
    compiled without the disk, and the call is repeated.
    """

    def __init__(self, name: str):
        self._name = f"verkv.loops.{name}"

    def __getattr__(self, name: str) -> Callable:
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments):
        kept = _keeps_compiled
        try:
            return getattr(importlib.import_module(self._name), name)(*arguments)
        except Exception as error:
            if not kept:
                raise
            _compile_anew(error)
        return getattr(importlib.import_module(self._name), name)(*arguments)


def _compile_anew(error: Exception) -> None:
    """Do without what is on disk, in this process."""
    global _keeps_compiled
    with _COMPILING:
        if not _keeps_compiled:
            return
        _keeps_compiled = False
        warnings.warn(
            f"numba's compiled loops could not be read or kept ({type(error).__name__}: {error}); they are compiled "
            f"for this process alone. Free disk space, or delete numba's cache (NUMBA_CACHE_DIR, or __pycache__ in the "
            f"folder verkv/loops)",
            stacklevel=5,
        )
        for name in MODULES:
            importlib.reload(importlib.import_module(f"verkv.loops.{name}"))
