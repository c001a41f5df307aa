"""Run KVPress' own evaluation pipeline with VerKV's presses.

KVPress' ``evaluation/`` comes from its pinned source distribution (``scripts/fetch_kvpress_tests.py``, hash checked).
Our presses join its registry, and its ``EvaluationRunner`` does the rest: predictions.csv, metrics.json, config.yaml.

    # two examples each of two tasks, made here for the demo model, then three presses on them; no network needed
    python experiments/kvpress_evaluation.py --data outputs/ruler --length 600 --build niah_single_1,qa_1 \\
        --n-examples 2 --press no_press verkv_kvzip kvzip --compression-ratio 0.8 --n-sink 16 --n-local 16

    # KVPress' RULER on the hub
    python experiments/kvpress_evaluation.py --data simonjegou/ruler --length 16384 --model Qwen/Qwen3-4B-Instruct-2507
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
FETCH_SCRIPT = ROOT / "scripts" / "fetch_kvpress_tests.py"
# KVPress' registry imports the scorers of all its benchmarks; RULER's and LOFT's need none of these.
SCORER_PACKAGES = ("nltk", "nltk.translate.bleu_score", "nltk.translate.meteor_score", "jieba", "rouge", "fuzzywuzzy")
SCORER_PACKAGES += ("bert_score",)


class Unavailable:
    """A function or an object of a package that is not installed: exists, and is an error when used."""

    def __init__(self, name: str):
        self._name = name

    def __call__(self, *args, **kwargs):
        raise ImportError(f"this benchmark's scorer needs {self._name}: pip install 'kvpress[eval]'")

    def __getattr__(self, attribute: str):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return self()


class StandIn(ModuleType):
    """Stands in for a package that only scorers of other benchmarks use, some of which make an object on import."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        if name[0].isupper():  # a class
            return lambda *args, **kwargs: Unavailable(full_name)
        return Unavailable(full_name)


def load_evaluation() -> tuple[ModuleType, ModuleType]:
    """KVPress' modules ``evaluate_registry`` and ``evaluate``, fetched if they are not there yet.

    Raises
    ------
    RuntimeError
        If the source distribution cannot be downloaded or has another hash.
    """
    spec = importlib.util.spec_from_file_location(FETCH_SCRIPT.stem, FETCH_SCRIPT)
    fetcher = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fetcher)
    folder = str(fetcher.fetch() / "evaluation")  # not its parent: KVPress' package is to be the installed one
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with stand_ins(SCORER_PACKAGES):
        return importlib.import_module("evaluate_registry"), importlib.import_module("evaluate")


@contextlib.contextmanager
def stand_ins(names: tuple[str, ...]):
    """Let packages be imported that are not installed, and the packages that they lie in; only within the block."""
    added = []
    for name in names:
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            part = ".".join(parts[:i])
            try:
                importlib.import_module(part)
            except ImportError:
                module = sys.modules[part] = StandIn(part)
                module.__path__ = []
                added.append(part)
    try:
        yield
    finally:
        for part in added:  # others look here to see what is installed
            del sys.modules[part]


def our_presses(options: argparse.Namespace) -> dict[str, object]:
    """Our presses by the names that they get in KVPress' registry. The runner sets their compression ratio."""
    from kvpress import FastKVzipPress as KVPressFastKVzip

    from verkv import FastKVzipPress, KVzipPress, PoissonCompPress, VerKVPress

    ends = {"n_sink": options.n_sink, "n_local": options.n_local}
    tolerance = {"epsilon": options.epsilon, "delta": options.delta, "sketch": options.sketch}
    return {
        "kvzip_topk": KVzipPress(),
        "fastkvzip_topk": FastKVzipPress(),
        "poissoncomp_kvzip": PoissonCompPress(KVzipPress(), **ends),
        "poissoncomp_fastkvzip": PoissonCompPress(KVPressFastKVzip(), **ends),
        "verkv_kvzip": VerKVPress(KVzipPress(), **ends, **tolerance),
        "verkv_fastkvzip": VerKVPress(KVPressFastKVzip(), **ends, **tolerance),
    }


def register(registry: ModuleType, options: argparse.Namespace) -> None:
    """Add our presses and data set to KVPress' registry, and LOFT with its scorer."""
    from verkv.evaluation import tasks

    def loft_scorer(frame) -> dict:
        scores = [tasks.score(row.task, row.predicted_answer, list(row.answer)) for row in frame.itertuples()]
        means = frame.assign(score=scores).groupby("task")["score"].mean()
        return {task: {"subspan_em": round(100 * mean, 2)} for task, mean in means.items()}

    registry.PRESS_REGISTRY.update(our_presses(options))
    registry.DATASET_REGISTRY.update(ruler=str(options.data), loft=str(options.data))
    registry.SCORER_REGISTRY["loft"] = loft_scorer


def build_parquet(options: argparse.Namespace) -> Path:
    """Write examples of our tasks where the runner looks for them: DATA/LENGTH/test-00000-of-00001.parquet."""
    from datasets import concatenate_datasets
    from transformers import AutoTokenizer

    from verkv.evaluation import tasks

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    parts = [
        tasks.build_examples(task, tokenizer, options.length, options.n_examples, options.seed, options.data_dir)
        for task in options.build
    ]
    path = Path(options.data) / str(options.length) / "test-00000-of-00001.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    concatenate_datasets(parts).to_parquet(path)
    return path


def evaluate(press_name: str, evaluation: ModuleType, options: argparse.Namespace) -> dict:
    """Run KVPress' runner with one press; where its files are, and its metrics in percent."""
    try:
        config = evaluation.EvaluationConfig(
            dataset=options.dataset,
            data_dir=str(options.length),
            model=str(options.model),
            device=options.device,
            press_name=press_name,
            compression_ratio=options.compression_ratio,
            fraction=options.fraction,
            max_new_tokens=options.max_new_tokens,
            output_dir=str(options.output_dir),
            log_level="WARNING",
            model_kwargs={"dtype": options.dtype},
            seed=options.seed,
        )
    except AssertionError as error:
        raise ValueError(str(error)) from error
    before = set(options.output_dir.rglob("metrics.json"))
    runner = evaluation.EvaluationRunner(config)
    runner.run_evaluation()
    (path,) = set(options.output_dir.rglob("metrics.json")) - before
    result = {"press": press_name, "folder": str(path.parent), "metrics": json.loads(path.read_text())}
    if stats := getattr(runner.press, "stats", None):
        result["sealed_layers"] = len(stats.sealed_layers)  # of the last context; 0: all of it was kept
    return result


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="KVPress' evaluation pipeline with VerKV's presses.")
    add = parser.add_argument
    add("--data", default="simonjegou/ruler", help="data set on the hub, or folder with LENGTH/test-*.parquet")
    add("--length", type=int, default=4096, help="tokens of a prompt: the data set's folder or configuration")
    add("--dataset", choices=("ruler", "loft"), default="ruler", help="which scorer")
    add("--build", type=lambda text: text.split(","), metavar="TASKS", help="first make examples of these tasks")
    add("--n-examples", type=int, default=2, help="examples per task to make")
    add("--data-dir", type=Path, help="data for --build's QA and LOFT tasks (default: VERKV_DATA)")
    add("--model", help="name or folder (default: the demo model)")
    add("--press", nargs="+", default=["verkv_kvzip"], help="names in KVPress' registry or ours")
    add("--compression-ratio", type=float, default=0.9375, help="share of the cache that is dropped")
    add("--epsilon", type=float, default=0.05)
    add("--delta", type=float, default=0.1)
    add("--sketch", help="VerKV's sketch (default: the library's)")
    add("--n-sink", type=int, default=64)
    add("--n-local", type=int, default=64)
    add("--fraction", type=float, default=1.0, help="share of the data set's rows")
    add("--max-new-tokens", type=int, help="default: the data set's")
    add("--device", help="default: all GPUs, or the CPU")
    add("--dtype", default="auto")
    add("--seed", type=int, default=0)
    add("--output-dir", type=Path, default=Path("outputs/kvpress_evaluation"))
    options = parser.parse_args(arguments)
    if options.model is None:
        from verkv.demo_model import demo_model_path

        options.model = demo_model_path()
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run all presses; print a JSON line for each."""
    options = parse(arguments)
    try:
        registry, evaluation = load_evaluation()
        register(registry, options)
        if unknown := [name for name in options.press if name not in registry.PRESS_REGISTRY]:
            raise ValueError(f"--press {' '.join(unknown)} is unknown; there are {', '.join(registry.PRESS_REGISTRY)}")
        if options.build:
            print(f"wrote {build_parquet(options)}", file=sys.stderr)
        for name in options.press:
            print(json.dumps(evaluate(name, evaluation, options)), flush=True)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"kvpress_evaluation: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
