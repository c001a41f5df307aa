"""KVPress-compatible presses. Importing them imports kvpress, which wraps transformers' attention functions."""

try:
    import kvpress  # noqa: F401
except ImportError as error:
    raise ImportError("VerKV's presses need KVPress: pip install 'verkv[kvpress]'") from error

from verkv.presses.fastkvzip_press import FastKVzipPress
from verkv.presses.kvzip_press import KVzipPress
from verkv.presses.poissoncomp_press import PoissonCompPress
from verkv.presses.queries import record_queries
from verkv.presses.verkv_press import VerKVPress

__all__ = ["FastKVzipPress", "KVzipPress", "PoissonCompPress", "VerKVPress", "record_queries"]
