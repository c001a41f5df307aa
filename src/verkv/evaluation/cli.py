"""``verkv eval``."""

import argparse
import sys
from pathlib import Path


def add_parser(commands) -> None:
    """Add ``eval`` to the sub-parsers of ``verkv``."""
    parser = commands.add_parser(
        "eval",
        help="run tasks with every method, rate and tolerance; one JSON line per answer",
        description="Settings come from a preset or a YAML file; flags override them. A run that was stopped goes on "
        "where it was. See docs/evaluation.md.",
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--preset", help="laptop, quick or paper")
    chosen.add_argument("--quick", action="store_const", const="quick", dest="preset", help="--preset quick")
    chosen.add_argument("--config", type=Path, metavar="FILE", help="settings in YAML, as in experiments/presets")
    several = {"nargs": "+", "metavar": "X"}
    parser.add_argument("--model", dest="models", nargs="+", metavar="NAME", help="names or folders of models")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="tasks, such as niah_single_1 vt qa_1 loft_nq")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="such as dense verkv kvpress:SnapKVPress")
    parser.add_argument("--n-tokens", type=int, help="length of prompt and answer", **several)
    parser.add_argument("--n-examples", type=int, metavar="N", help="examples of every task")
    parser.add_argument("--compression", type=float, help="how many times smaller: 8 16 32", **several)
    parser.add_argument("--epsilon", type=float, help="VerKV's tolerances", **several)
    parser.add_argument("--delta", type=float, help="probabilities with which they may be missed", **several)
    parser.add_argument("--seeds", type=int, help="of the draws", **several)
    parser.add_argument("--data-seed", type=int, metavar="N", help="of the tasks' examples")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="longest answer, if shorter than the task's")
    parser.add_argument("--n-sink", type=int, metavar="N", help="leading tokens of samples (default: by the length)")
    parser.add_argument("--n-local", type=int, metavar="N", help="trailing tokens of samples (default: by the length)")
    parser.add_argument("--audit", action="store_true", default=None, help="compare all decisions with exact attention")
    parser.add_argument("--data-dir", metavar="FOLDER", help="the tasks' data (default: the variable VERKV_DATA)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU for each process where there are GPUs)")
    parser.add_argument("--dtype", help="auto, float32, bfloat16 or float16 (default: the model's own)")
    parser.add_argument("--device-map", metavar="MAP", help='"auto" spreads a large model over all GPUs')
    parser.add_argument("--output", metavar="FILE", help="results (default: outputs/eval.jsonl)")


def run(options: argparse.Namespace) -> int:
    """Run the evaluation; returns the exit status."""
    try:
        from verkv.evaluation import runner
        from verkv.evaluation.plan import load_tasks
        from verkv.evaluation.settings import make_settings, preset_path, read_settings
    except ImportError as error:
        print(f"verkv eval: {error}; pip install 'verkv[demo]'", file=sys.stderr)
        return 1
    flags = {name: value for name, value in vars(options).items() if name not in ("command", "preset", "config")}
    try:
        path = preset_path(options.preset) if options.preset else options.config
        settings = make_settings(read_settings(path) if path else {}, flags, load_tasks().TASKS)
        n_written = runner.run_eval(settings)
    except ValueError as error:
        return _refuse(error, 2)
    except (runner.EvaluationError, NotImplementedError, OSError) as error:
        return _refuse(error, 1)
    except KeyboardInterrupt:
        print("verkv eval: stopped; the same command goes on where it was", file=sys.stderr)
        return 130
    print(f"{n_written} answers added to {settings.output}")
    return 0


def _refuse(error: Exception, status: int) -> int:
    """Say in one line what is wrong; other packages' messages may have several."""
    print("verkv eval:", " ".join(str(error).split()), file=sys.stderr)
    return status
