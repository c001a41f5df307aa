"""Checks of arguments that several modules share."""

import operator


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
