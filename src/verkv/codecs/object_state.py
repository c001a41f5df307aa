"""Objects of the library's own classes as JSON and tensors, and back: what a sealed context refers to, without pickle.

Only classes that live in the modules named below are stored or made again, attribute by attribute; nothing is called.
"""

import importlib

import torch
from torch import Tensor

from verkv.codecs.errors import CodecError, CorruptFileError
from verkv.codecs.tensor_store import DTYPES, TensorReader, TensorWriter, dtype_name

_PARTS = ("context", "estimators", "kvfetch", "planning", "rotary", "sketches", "tiers", "values")
_MODULES = tuple(f"verkv.{part}" for part in _PARTS)


def dump_state(value, writer: TensorWriter, name: str):
    """A value as what JSON can hold; its tensors go to the writer, under names that begin with ``name``.

    Parameters
    ----------
    value : None, bool, int, float, str, Tensor, torch.dtype, torch.device, list, tuple, dict with string keys, or an
        object of the library's classes made of such
    writer : TensorWriter
    name : str

    Returns
    -------
    object
        For :func:`load_state`.

    Raises
    ------
    CodecError
        If the value is of another kind.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        writer.put(name, value)
        return {"tensor": name}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": True}  # of the loading process
    if type(value) in (list, tuple):
        items = [dump_state(item, writer, f"{name}.{number}") for number, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: dump_state(item, writer, f"{name}.{key}") for key, item in value.items()}}
    kind = type(value)
    if isinstance(value, (tuple, list, dict)) or not _is_allowed(kind.__module__) or not hasattr(value, "__dict__"):
        raise CodecError(f"{name} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored in a file")
    attributes = {key: dump_state(item, writer, f"{name}.{key}") for key, item in vars(value).items()}
    return {"object": f"{kind.__module__}:{kind.__qualname__}", "attributes": attributes}


def load_state(node, reader: TensorReader, device: torch.device):
    """Inverse of :func:`dump_state`, with tensors on a device.

    Raises
    ------
    CorruptFileError
        If the state names a class that is not the library's, or makes no sense.
    """
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    try:
        if "tensor" in node:
            return reader.get(node["tensor"]).to(device)
        if "dtype" in node:
            return DTYPES[node["dtype"]]
        if "device" in node:
            return device
        if "dict" in node:
            return {key: load_state(item, reader, device) for key, item in node["dict"].items()}
        for kind, make in (("list", list), ("tuple", tuple)):
            if kind in node:
                return make(load_state(item, reader, device) for item in node[kind])
        made = object.__new__(_find_class(node["object"]))
        attributes = {key: load_state(item, reader, device) for key, item in node["attributes"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptFileError(f"the state of an object in the file makes no sense ({error!r})") from None
    vars(made).update(attributes)  # also of frozen dataclasses
    return made


def _is_allowed(module: str) -> bool:
    return any(module == allowed or module.startswith(allowed + ".") for allowed in _MODULES)


def _find_class(path: str) -> type:
    module, _, name = path.partition(":")
    found = None
    if _is_allowed(module):
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            found = None
    # A name that a module merely imported is not one of its classes.
    if not isinstance(found, type) or found.__module__ != module or issubclass(found, BaseException):
        raise CorruptFileError(f"the file names {path!r}, which is no class of the library that contexts consist of")
    return found
