"""Methods by name: which press each is, what it depends on, and how it is made."""

import dataclasses
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

FOREIGN = "kvpress:"


@dataclass(frozen=True)
class Known:
    """A method that has a name.

    Attributes
    ----------
    label : str
        For tables and plots.
    press : str or None
        Class of ``verkv``; None for dense attention.
    source : {"kvzip", "fastkvzip"} or None
        Where its scores come from.
    axes : tuple of str
        Settings that the answer depends on.
    options : dict
        Of the press, before the user's.
    """

    label: str
    press: str | None = None
    source: str | None = None
    axes: tuple[str, ...] = ()
    options: dict = field(default_factory=dict)


_SAMPLED = ("compression", "seed")
_VERIFIED = ("compression", "epsilon", "delta", "seed")
# Everything is read as soon as a head would read anything, and hardly any bound is below so small a tolerance.
_EVERYTHING = {"sketch": "exact", "epsilon": 1e-9, "max_read": 1e-9}
KNOWN = {
    "dense": Known("Dense"),
    "dense_offloaded": Known("Dense, offloaded"),
    "verkv_everything": Known("VerKV, everything fetched", "VerKVPress", "kvzip", _SAMPLED, _EVERYTHING),
    "kvzip": Known("KVzip top-k", "KVzipPress", "kvzip", ("compression",)),
    "fastkvzip": Known("Fast KVzip top-k", "FastKVzipPress", "fastkvzip", ("compression",)),
    "poissoncomp": Known("PoissonComp", "PoissonCompPress", "kvzip", _SAMPLED),
    "verkv": Known("VerKV (2-bit)", "VerKVPress", "kvzip", _VERIFIED, {"sketch": "rope_pair"}),
    "verkv_exact": Known("VerKV (exact)", "VerKVPress", "kvzip", _VERIFIED, {"sketch": "exact"}),
    "verkv_default": Known("VerKV (default)", "VerKVPress", "kvzip", _VERIFIED),
    "verkv_fastkvzip": Known(
        "VerKV (Fast KVzip, 2-bit)", "VerKVPress", "fastkvzip", _VERIFIED, {"sketch": "rope_pair"}
    ),
}
# Reported in fields of their own, or without a meaning in a table.
_NOT_OPTIONS = ("press", "compression_ratio", "epsilon", "delta", "seed", "sketch", "tokenizer", "gates", "audit")
_NOT_OPTIONS += ("record_bounds", "on_violation", "bases", "chunk_size", "reseal_every", "max_tail")
# Options of presses that the settings give, or that have no meaning here.
_REFUSED = {"press", "compression_ratio", "seed", "audit", "epsilon", "delta", "record_bounds", "on_violation"}
_REFUSED |= {"tokenizer", "reseal_every", "max_tail"}
# KVPress' own names for how much is removed, where a press does not take ``compression_ratio``.
_RATIO_NAMES = ("compression_ratio", "head_compression_ratio", "key_channel_compression_ratio")


@dataclass(frozen=True)
class Method:
    """A method with the user's options.

    Attributes
    ----------
    name : str
        One of ``KNOWN``, or ``kvpress:`` and a class of KVPress.
    options : dict
        Of the press; ``gates`` (a file) for Fast KVzip.
    label : str or None
        Instead of the method's own.
    is_rated : bool
        False for a press of KVPress that takes no rate (``compression: null``); it is run once, with its own options.
    """

    name: str
    options: dict = field(default_factory=dict)
    label: str | None = None
    is_rated: bool = True

    @property
    def is_foreign(self) -> bool:
        """Whether the press is KVPress' own and acts in its own prefill."""
        return self.name.startswith(FOREIGN)

    @property
    def known(self) -> Known:
        """The table's entry."""
        if self.is_foreign:
            name = self.name.removeprefix(FOREIGN)
            return Known(name.removesuffix("Press"), name, None, ("compression",))
        return KNOWN[self.name]

    @property
    def gates(self) -> str | None:
        """File with Fast KVzip's gates."""
        return self.options.get("gates")

    @property
    def source(self) -> tuple[str, str | None] | None:
        """What identifies its scores: the source's name and the file of its gates."""
        return self.known.source and (self.known.source, self.gates if self.known.source == "fastkvzip" else None)


@dataclass(frozen=True)
class Setting:
    """A method at one rate, tolerance and draw; what does not apply is None.

    Attributes
    ----------
    method : Method
    compression : float or None
        How many times smaller the cache gets: 16.0; 1.0 for dense attention.
    epsilon, delta : float or None
    seed : int or None
        Of the draw.
    """

    method: Method
    compression: float | None
    epsilon: float | None = None
    delta: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Protection:
    """How many leading and trailing tokens samples always hold."""

    n_sink: int
    n_local: int

    @classmethod
    def scaled(cls, n_tokens: int, n_sink: int | None, n_local: int | None) -> "Protection":
        """The paper's 64 + 64 from 24,000 tokens on, in proportion below, unless numbers are given."""
        auto = max(4, min(64, n_tokens // 375))
        return cls(auto if n_sink is None else n_sink, auto if n_local is None else n_local)


def parse_method(entry) -> Method:
    """A method of a settings file: a name, or a name with options.

    Raises
    ------
    ValueError
        If there is no such method, or the entry has another form.
    """
    if isinstance(entry, dict) and len(entry) == 1:
        name, options = next(iter(entry.items()))
        options = {} if options is None else options
    else:
        name, options = entry, {}
    if not isinstance(name, str) or not isinstance(options, dict):
        raise ValueError(f"methods must be names, or one name with a mapping of options each; got {entry!r}")
    options = dict(options)
    if options.get("compression") is not None:
        raise ValueError(f"method {name}: compression is the settings' own key; null says that a press takes no rate")
    is_rated = "compression" not in options
    options.pop("compression", None)
    method = Method(name, options, options.pop("label", None), is_rated)
    if method.gates is not None and not Path(str(method.gates)).is_file():
        raise ValueError(f"method {name}: gates={str(method.gates)!r} is not a file")
    if method.is_foreign:
        foreign_class(method.known.press)
    elif name not in KNOWN:
        raise ValueError(f"there is no method {name!r}; choose from {', '.join(KNOWN)}, or {FOREIGN}CLASS")
    elif method.known.press is None and options:
        raise ValueError(f"method {name} takes no options, got {sorted(options)}")
    return method


def foreign_class(name: str) -> type:
    """A press of KVPress by its class' name.

    Raises
    ------
    ValueError
        If there is none, or it acts while decoding.
    """
    import kvpress

    found = getattr(kvpress, name, None)
    if not (isinstance(found, type) and issubclass(found, kvpress.BasePress) and dataclasses.is_dataclass(found)):
        raise ValueError(f"KVPress has no press {name!r} (method {FOREIGN}{name}); names end in 'Press'")
    if issubclass(found, (kvpress.DecodingPress, kvpress.PrefillDecodingPress)):
        raise ValueError(f"method {FOREIGN}{name} compresses while decoding; only presses that act in prefill can run")
    return found


def make_press(setting: Setting, protection: Protection, draw_seed: int = 0, audit: bool = False):
    """The press of a setting, None for dense attention.

    Raises
    ------
    ValueError
        If an option is unknown or out of range.
    """
    method = setting.method
    if method.known.press is None:
        return None
    try:
        return _foreign(setting) if method.is_foreign else _own(setting, protection, draw_seed, audit)
    except (TypeError, ValueError, NotImplementedError, AssertionError) as error:
        raise ValueError(f"method {method.name}: {error}") from error


def _own(setting: Setting, protection: Protection, draw_seed: int, audit: bool):
    import verkv

    known, options = setting.method.known, dict(setting.method.options)
    gates = options.pop("gates", None)
    chosen = {"compression_ratio": 1 - 1 / setting.compression, "audit": audit}
    if "seed" in known.axes:
        source = verkv.KVzipPress() if known.source == "kvzip" else verkv.FastKVzipPress(gates=gates)
        chosen |= {"press": source, "seed": draw_seed, **dataclasses.asdict(protection)}
        if known.press == "VerKVPress":
            chosen["record_bounds"] = audit
    elif known.source == "fastkvzip":
        chosen["gates"] = gates
    if "epsilon" in known.axes:
        chosen |= {"epsilon": setting.epsilon, "delta": setting.delta}
    refused = sorted(set(options) & _REFUSED)
    if refused:
        raise ValueError(f"{', '.join(refused)} cannot be options of a method")
    return getattr(verkv, known.press)(**chosen | known.options | options)


def _foreign(setting: Setting):
    press = _nested(setting.method.known.press, setting.method.options)
    if setting.compression is None:
        return press
    ratio = 1 - 1 / setting.compression
    own_fields = {f.name for f in dataclasses.fields(press)}
    for name in _RATIO_NAMES:
        if name not in own_fields and not isinstance(getattr(type(press), name, None), property):
            continue
        try:
            setattr(press, name, ratio)
        except (AttributeError, AssertionError, NotImplementedError):  # a property that only tells
            continue
        return press
    raise ValueError("takes no compression_ratio; give its own options, and compression: null for the method")


def _nested(name: str, options: dict):
    """A press of KVPress; ``press`` and ``presses`` among its options are presses themselves."""
    made = dict(options)
    for key in ("press", "presses", "base_press"):
        if key in made:
            entries = made[key] if isinstance(made[key], list) else [made[key]]
            inner = [_nested(inner.name, inner.options) for inner in map(_inner, entries)]
            made[key] = inner if isinstance(made[key], list) else inner[0]
    return foreign_class(name)(**made)


def _inner(entry) -> Method:
    name, options = next(iter(entry.items())) if isinstance(entry, dict) else (entry, {})
    return Method(name.removeprefix(FOREIGN), options or {})


def describe(setting: Setting, press) -> dict:
    """What a line says of the method: names, rates, and every option the press really has.

    Returns
    -------
    dict
        Keys method, label, press, sketch, compression, epsilon, delta, options; plain JSON.
    """
    known, method = setting.method.known, setting.method
    names = {"kvzip": "KVzip", "fastkvzip": "FastKVzip", None: known.press}
    sketch = press._option("sketch") if known.press == "VerKVPress" and not method.is_foreign else None
    return {
        "method": method.name,
        "label": method.label or known.label,
        "press": names[known.source],
        "sketch": sketch if sketch is None or isinstance(sketch, str) else sketch.name,
        "compression": setting.compression,
        "epsilon": setting.epsilon,
        "delta": setting.delta,
        "options": _options(setting, press),
    }


def _options(setting: Setting, press) -> dict:
    method = setting.method
    if press is None:
        return {}
    if method.is_foreign:
        return method.options
    names = [f.name for f in dataclasses.fields(press) if f.name not in _NOT_OPTIONS]
    resolved = getattr(press, "_option", None)
    defaulted = ("alpha", "outliers", "error_aware", "shortlist", "sided")
    options = {name: resolved(name) if resolved and name in defaulted else getattr(press, name) for name in names}
    if "budget_scope" in options and "seed" in method.known.axes:
        options["budget_scope"] = press._scope()
    # What is not set is left out: an option that a later version adds does not make its answers new ones.
    options = {name: value for name, value in options.items() if value is not None}
    if method.gates is not None:  # a file may be replaced under its name
        options["gates"] = hashlib.sha256(Path(method.gates).read_bytes()).hexdigest()[:16]
    return options
