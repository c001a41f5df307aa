"""KVPress' own evaluation pipeline with our presses, on examples made here, without a hub."""

import csv
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("kvpress")
ROOT = Path(__file__).parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("kvpress_evaluation", ROOT / "experiments" / "kvpress_evaluation.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


@pytest.fixture(scope="module")
def evaluation():
    """KVPress' modules; what was imported and put on the path for them is gone afterwards."""
    if not (ROOT / ".cache" / "kvpress-0.5.5" / "evaluation" / "evaluate.py").is_file():
        pytest.skip("KVPress' evaluation is not there; run scripts/fetch_kvpress_tests.py")
    modules, path = dict(sys.modules), list(sys.path)
    yield script.load_evaluation()
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        if name.split(".")[0] in ("benchmarks", "evaluate", "evaluate_registry"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def model_folder(tiny_model, tmp_path_factory):
    """A tiny Llama with SmolLM2's tokenizer."""
    from transformers import AutoTokenizer

    from verkv.demo_model import demo_model_path

    folder = tmp_path_factory.mktemp("tiny_llama")
    tiny_model("llama", vocab_size=49152, num_hidden_layers=2).save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_model_path()).save_pretrained(folder)
    return folder


@pytest.fixture
def run(evaluation, model_folder, tmp_path, monkeypatch, capsys):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folders = ["--data", str(tmp_path / "data"), "--output-dir", str(tmp_path / "out"), "--model", str(model_folder)]

    def run(*arguments):
        status = script.main([*folders, *map(str, arguments)])
        printed = capsys.readouterr()
        return status, [json.loads(line) for line in printed.out.splitlines()], printed.err.splitlines()

    return run


SMALL = ("--n-sink", 8, "--n-local", 8, "--max-new-tokens", 3, "--device", "cpu", "--dtype", "float32")


def test_runs_our_presses_beside_kvpress_own(run, tmp_path):
    presses = ["no_press", "knorm", "poissoncomp_kvzip", "verkv_kvzip"]
    build = ("--build", "niah_single_1,vt", "--length", 800, "--n-examples", 1)
    status, results, _ = run("--press", *presses, *build, "--compression-ratio", 0.5, *SMALL)
    assert status == 0 and [result["press"] for result in results] == presses
    for result in results:
        assert set(result["metrics"]) == {"niah_single_1", "vt"}
        with Path(result["folder"], "predictions.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == 2 and all(row["predicted_answer"] for row in rows)
        ratio = 0.0 if result["press"] == "no_press" else 0.5
        assert {float(row["compression_ratio"]) for row in rows} == {ratio}
        config = yaml.safe_load(Path(result["folder"], "config.yaml").read_text())
        assert config["press_name"] == result["press"] and config["compression_ratio"] == ratio
    assert [result.get("sealed_layers") for result in results] == [None, None, 2, 2]
    assert "VerKVPress" in config["press_init_command"]


def test_options_reach_the_press(evaluation):
    options = script.parse(["--epsilon", "0.2", "--delta", "0.3", "--sketch", "exact", "--n-sink", "3", "--model", "m"])
    press = script.our_presses(options)["verkv_kvzip"]
    assert (press.epsilon, press.delta, press.sketch, press.n_sink, press.n_local) == (0.2, 0.3, "exact", 3, 64)


def test_loft_has_its_own_score(evaluation, tmp_path):
    import pandas as pd

    registry, _ = evaluation
    script.register(registry, script.parse(["--data", str(tmp_path), "--model", "m"]))
    frame = pd.DataFrame(
        {
            "task": ["loft_nq", "loft_nq", "loft_quest"],
            "predicted_answer": ["Final Answer: ['the city of Warsaw']", "Warsaw", "Final Answer: ['b1', 'b2']"],
            "answer": [["Warsaw"], ["Warsaw"], ["b2", "b1"]],
        }
    )
    metrics = registry.SCORER_REGISTRY["loft"](frame)
    assert metrics == {"loft_nq": {"subspan_em": 50.0}, "loft_quest": {"subspan_em": 100.0}}
    assert registry.DATASET_REGISTRY["loft"] == registry.DATASET_REGISTRY["ruler"] == str(tmp_path)


def test_kvpress_scorer_agrees_with_ours(evaluation):
    import pandas as pd

    from verkv.evaluation import tasks

    registry, _ = evaluation
    cases = [
        ("niah_multivalue", "They are 12, and 34.", ["12", "34", "56"]),
        ("vt", "abcde ÉCOLE", ["ABCDE", "école", "x"]),
        ("qa_1", "It was Warsaw.", ["Krakow", "warsaw"]),
        ("qa_2", "", ["Krakow"]),
    ]
    for task, prediction, answers in cases:
        frame = pd.DataFrame({"task": [task], "predicted_answer": [prediction], "answer": [answers]})
        theirs = registry.SCORER_REGISTRY["ruler"](frame)[task]["string_match"]
        assert theirs == pytest.approx(100 * tasks.score(task, prediction, answers), abs=0.01)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--press", "nonsense"], "--press nonsense is unknown; there are .*verkv_kvzip"),
        (["--fraction", "2"], "fraction must be between 0.0 and 1.0, got 2.0"),
        (["--build", "niah"], "task must be one of .*; got 'niah'"),
        (["--build", "vt", "--length", "100"], "n_tokens must be at least"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run, tmp_path, arguments, message):
    status, results, errors = run(*arguments)
    assert status == 2 and results == []
    assert len(errors) == 1
    assert re.search(message, errors[0])
    assert not list(tmp_path.rglob("*.parquet"))


def test_stand_ins_are_errors_when_used_and_do_not_stay(evaluation):
    assert "not_there" not in sys.modules
    with script.stand_ins(("not_there.scores", "json")):
        from not_there.scores import Scorer, compute

        scorer = Scorer("x")
        with pytest.raises(ImportError, match=r"needs not_there\.scores\.compute: pip install"):
            compute(1)
        with pytest.raises(ImportError, match="Scorer: pip install"):
            scorer.get_scores(1)
        assert sys.modules["json"] is json
    assert not any(name.startswith("not_there") for name in sys.modules)


def test_the_fetch_script_is_the_one_that_the_tests_use():
    assert script.FETCH_SCRIPT == ROOT / "scripts" / "fetch_kvpress_tests.py" and script.FETCH_SCRIPT.is_file()
