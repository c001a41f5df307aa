"""VerKV: verifiable KV-cache compression for long-context language models.

Public names are resolved when they are first used: importing this package imports neither transformers nor kvpress and
changes nothing.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors, which do not run __getattr__
    from verkv.cache import VerKVCache, make_cache, reseal
    from verkv.chunked import prefill
    from verkv.conversation import Conversation
    from verkv.presses import FastKVzipPress, KVzipPress, PoissonCompPress, VerKVPress, record_queries
    from verkv.sketches import ExactSketch, RopePairSketch
    from verkv.stats import FetchStats, MemoryReport, memory_report

__version__ = "0.1.0"

_HOMES = {
    "FastKVzipPress": "verkv.presses",
    "KVzipPress": "verkv.presses",
    "PoissonCompPress": "verkv.presses",
    "VerKVPress": "verkv.presses",
    "record_queries": "verkv.presses",
    "VerKVCache": "verkv.cache",
    "make_cache": "verkv.cache",
    "reseal": "verkv.cache",
    "prefill": "verkv.chunked",
    "Conversation": "verkv.conversation",
    "FetchStats": "verkv.stats",
    "MemoryReport": "verkv.stats",
    "memory_report": "verkv.stats",
    "ExactSketch": "verkv.sketches",
    "RopePairSketch": "verkv.sketches",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'verkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
