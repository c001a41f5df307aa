"""Settings of ``verkv eval``: a YAML file or a preset, flags over it, and what is to run."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

from verkv.checks import check_count
from verkv.evaluation.methods import Method, Setting, parse_method

DEMO_MODEL = "SmolLM2-135M-Instruct"
# What may differ between the parts of a run.
_AXES = ("tasks", "n_tokens", "methods", "compression", "epsilon", "delta", "seeds", "n_examples")


@dataclass(frozen=True)
class Grid:
    """A full product of settings.

    Attributes
    ----------
    tasks : tuple of str
    n_tokens : tuple of int
        Of the prompt and its answer together.
    methods : tuple of Method
    compression : tuple of float
        How many times smaller: 16 is KVPress' 0.9375.
    epsilon, delta : tuple of float
    seeds : tuple of int
        Of the draws.
    n_examples : int
        Of every task.
    """

    tasks: tuple[str, ...]
    n_tokens: tuple[int, ...] = (3000,)
    methods: tuple[Method, ...] = (Method("dense"), Method("kvzip"), Method("poissoncomp"), Method("verkv_default"))
    compression: tuple[float, ...] = (16.0,)
    epsilon: tuple[float, ...] = (0.05,)
    delta: tuple[float, ...] = (0.1,)
    seeds: tuple[int, ...] = (0,)
    n_examples: int = 4

    def settings(self) -> list[Setting]:
        """Methods at every rate, tolerance and draw that they depend on."""
        found = []
        for method in self.methods:
            axes = method.known.axes
            rates = self.compression if "compression" in axes else (1.0,)
            found += [
                Setting(method, rate, epsilon, delta, seed)
                for rate in (rates if method.is_rated else (None,))
                for epsilon in (self.epsilon if "epsilon" in axes else (None,))
                for delta in (self.delta if "delta" in axes else (None,))
                for seed in (self.seeds if "seed" in axes else (None,))
            ]
        return found


@dataclass(frozen=True)
class EvalSettings:
    """Everything of one run.

    Attributes
    ----------
    grids : tuple of Grid
        What is run; an answer that several ask for is given once.
    models : tuple of str or None
        Names or folders; None is the demo model.
    data_seed : int
        Of the tasks' examples.
    max_new_tokens : int or None
        Upper limit of an answer's length beside the task's own.
    n_sink, n_local : int or None
        Tokens that samples always hold at the ends; None scales them to the length.
    audit : bool
        Compare every decision with exact attention.
    data_dir : Path or None
        Folder with the tasks' data; also ``VERKV_DATA``.
    device, dtype, device_map : str or None
    output : Path
    """

    grids: tuple[Grid, ...]
    models: tuple[str | None, ...] = (None,)
    data_seed: int = 0
    max_new_tokens: int | None = None
    n_sink: int | None = None
    n_local: int | None = None
    audit: bool = False
    data_dir: Path | None = None
    device: str | None = None
    dtype: str | None = None
    device_map: str | None = None
    output: Path = field(default_factory=lambda: Path("outputs") / "eval.jsonl")


def read_settings(path: Path) -> dict:
    """A settings file as a mapping.

    Raises
    ------
    ValueError
        If there is no such file, or it is not a YAML mapping.
    """
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"settings file {str(path)!r} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"settings file {str(path)!r} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"settings file {str(path)!r} must be a mapping of settings")
    return values


def preset_path(name: str) -> Path:
    """File of a preset.

    Raises
    ------
    ValueError
        If there is none of that name.
    """
    from verkv import evaluation

    folders = [Path(folder) / "presets" for folder in evaluation.__path__]
    found = {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
    if name not in found:
        raise ValueError(f"there is no preset {name!r}; choose from {sorted(found)}, or give --config FILE")
    return found[name]


def make_settings(values: dict, flags: dict, known_tasks: Iterable[str]) -> EvalSettings:
    """Settings from a file's mapping and from flags, which override it wherever a key stands.

    Parameters
    ----------
    values : dict
        Keys of :class:`EvalSettings` but ``grids``; those of :class:`Grid`; and ``also``, a list of mappings with keys
        of :class:`Grid`, each a further grid that differs in these.
    flags : dict
        The same keys; None means not given.
    known_tasks : iterable of str

    Returns
    -------
    EvalSettings

    Raises
    ------
    ValueError
        If a key is unknown, or a value is out of range; names it.
    """
    flags = {name: value for name, value in flags.items() if value is not None}
    values = dict(values)
    also = values.pop("also", None) or []
    values |= flags
    known = {f.name for f in fields(EvalSettings)} - {"grids"}
    unknown = set(values) - known - set(_AXES)
    if unknown:
        raise ValueError(f"unknown settings {sorted(unknown)}; known are {sorted(known | set(_AXES) | {'also'})}")
    axes = {name: values.pop(name) for name in _AXES if name in values}
    if not isinstance(also, list) or not all(isinstance(entry, dict) and set(entry) <= set(_AXES) for entry in also):
        raise ValueError(f"also must be a list of mappings with keys of {list(_AXES)}, got {also!r}")
    own = {name: flags[name] for name in flags if name in _AXES}
    grids = tuple(_grid(axes | entry | own, set(known_tasks)) for entry in [{}, *also])
    return EvalSettings(grids, **_common(values))


def _grid(values: dict, known_tasks: set[str]) -> Grid:
    made = {}
    for name, value in values.items():
        if name == "n_examples":
            made[name] = check_count("n_examples", value, least=1)
            continue
        entries = value if isinstance(value, (list, tuple)) else [value]
        if not entries:
            raise ValueError(f"{name} must not be empty")
        made[name] = tuple(_CHECKS[name](entry) for entry in entries)
    if "tasks" not in made:
        raise ValueError("tasks must be given: names of tasks to run")
    unknown = [task for task in made["tasks"] if task not in known_tasks]
    if unknown:
        raise ValueError(f"there is no task {unknown[0]!r}; choose from {', '.join(sorted(known_tasks))}")
    return Grid(**made)


def _number(name: str, low: float, high: float, includes_low: bool = False):
    """A check for a number between two bounds."""

    def check(value) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (low < value < high or (includes_low and value == low)):
            bracket = "[" if includes_low else "("
            raise ValueError(f"{name} must be a number in {bracket}{low:g}, {high:g}), got {value!r}")
        return float(value)

    return check


_CHECKS = {
    "tasks": str,
    "methods": lambda entry: entry if isinstance(entry, Method) else parse_method(entry),
    "n_tokens": lambda value: check_count("n_tokens", value, least=1),
    "compression": _number("compression", 1.0, float("inf"), includes_low=True),
    "epsilon": _number("epsilon", 0.0, float("inf")),
    "delta": _number("delta", 0.0, 1.0),
    "seeds": lambda value: check_count("seeds", value),
}


def _common(values: dict) -> dict:
    """Settings that hold for the whole run."""
    made = dict(values)
    if "models" in made:
        models = made["models"] if isinstance(made["models"], (list, tuple)) else [made["models"]]
        if not models or not all(model is None or isinstance(model, str) for model in models):
            raise ValueError(f"models must be names or folders, got {made['models']!r}")
        made["models"] = tuple(None if model == DEMO_MODEL else model for model in models)
    for name in ("data_seed", "n_sink", "n_local"):
        if made.get(name) is not None:
            check_count(name, made[name])
    if made.get("max_new_tokens") is not None:
        check_count("max_new_tokens", made["max_new_tokens"], least=1)
    if not isinstance(made.get("audit", False), bool):
        raise ValueError(f"audit must be true or false, got {made['audit']!r}")
    for name in ("device", "dtype", "device_map"):
        if made.get(name) is not None and not isinstance(made[name], str):
            raise ValueError(f"{name} must be a name, got {made[name]!r}")
    if made.get("device") and made.get("device_map"):
        raise ValueError("device and device_map exclude each other: give one")
    data_dir = made.get("data_dir") or os.environ.get("VERKV_DATA") or None
    made["data_dir"] = Path(data_dir) if data_dir else None
    if made["data_dir"] is not None and not made["data_dir"].is_dir():
        raise ValueError(f"data_dir={str(data_dir)!r} is not a folder")
    if "output" in made:
        made["output"] = Path(made["output"])
    return made
