"""Checks of arguments and settings that several modules share."""

import operator
import os


def check_count(name: str, value: object, least: int = 0) -> int:
    """The value as an int.

    Raises
    ------
    ValueError
        If it is no integer or smaller than ``least``; names the argument.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return operator.index(value)


def is_switched_on(name: str) -> bool:
    """What an environment variable says that is 0 (torch only) or 1, the default.

    Raises
    ------
    ValueError
        If it is neither.
    """
    wanted = os.environ.get(name, "") or "1"
    if wanted not in ("0", "1"):
        raise ValueError(f"{name} must be 0 (torch only) or 1, got {wanted!r}")
    return wanted == "1"
