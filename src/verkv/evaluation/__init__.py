"""``verkv eval``: tasks x methods x rates, one JSON line per answer. See ``docs/evaluation.md``."""

from pathlib import Path

# The tasks and presets are kept with the experiments. A wheel carries them inside this package; in a checkout they are
# found where they lie, so that `verkv.evaluation.tasks` is the same name in both.
_experiments = Path(__file__).resolve().parents[3] / "experiments"
if (_experiments / "tasks").is_dir() and (_experiments.parent / "src" / "verkv" / "evaluation").is_dir():
    __path__.append(str(_experiments))
