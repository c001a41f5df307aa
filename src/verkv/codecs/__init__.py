"""kvtc: transform coding of a model's cache, to keep contexts between turns, in host memory and on disk.

Names are resolved when they are first used: importing this package imports nothing heavy.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors, which do not run __getattr__
    from verkv.codecs.artefact import Artefact
    from verkv.codecs.calibration import CalibrationConfig, Calibrator, calibrate
    from verkv.codecs.compressed import CompressedCache
    from verkv.codecs.config import KvtcConfig
    from verkv.codecs.container import Container
    from verkv.codecs.context_file import is_prefix, load_context, open_context, save_context
    from verkv.codecs.errors import CodecError, CorruptFileError, FormatError, MismatchError, VersionError
    from verkv.codecs.host_tier import CompressedHostTier, HostCodec, denominator_error
    from verkv.codecs.kvtc import KVTC
    from verkv.codecs.measure import reconstruction_error, relative_errors, token_errors
    from verkv.codecs.transform import Stages

_HOMES = {
    "Artefact": "artefact",
    "CalibrationConfig": "calibration",
    "Calibrator": "calibration",
    "CodecError": "errors",
    "CompressedCache": "compressed",
    "CompressedHostTier": "host_tier",
    "Container": "container",
    "CorruptFileError": "errors",
    "FormatError": "errors",
    "HostCodec": "host_tier",
    "KVTC": "kvtc",
    "KvtcConfig": "config",
    "MismatchError": "errors",
    "Stages": "transform",
    "VersionError": "errors",
    "calibrate": "calibration",
    "denominator_error": "host_tier",
    "is_prefix": "context_file",
    "load_context": "context_file",
    "open_context": "context_file",
    "reconstruction_error": "measure",
    "relative_errors": "measure",
    "save_context": "context_file",
    "token_errors": "measure",
}

__all__ = [
    "KVTC",
    "Artefact",
    "CalibrationConfig",
    "Calibrator",
    "CodecError",
    "CompressedCache",
    "CompressedHostTier",
    "Container",
    "CorruptFileError",
    "FormatError",
    "HostCodec",
    "KvtcConfig",
    "MismatchError",
    "Stages",
    "VersionError",
    "calibrate",
    "denominator_error",
    "is_prefix",
    "load_context",
    "open_context",
    "reconstruction_error",
    "relative_errors",
    "save_context",
    "token_errors",
]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"verkv.codecs.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'verkv.codecs' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
