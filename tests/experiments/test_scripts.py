"""Scripts of the paper's tables and figures: on made-up answers, on a tiny model, and their data against the paper."""

import argparse
import csv
import importlib
import itertools
import sys
from pathlib import Path

import pytest
import torch
from answers import answers, write

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
sys.path.append(str(EXPERIMENTS))  # scripts import each other

pytest.importorskip("matplotlib", reason="the scripts' pictures need matplotlib")
pytest.importorskip("kvpress", reason="the scripts run presses")

import paper_items  # noqa: E402

FROM_ANSWERS = ("table1_quality", "table2_fetch", "figure3_compression", "figure4_tolerance", "appendix_c")
ON_THE_SPOT = ("figure2_shrinkage", "figure5_adherence", "figure6_latency", "figure7_9_system")


def script(name: str):
    """A script as a module."""
    return importlib.import_module(name)


def read_csv(path: Path) -> list[dict]:
    """Rows of a CSV."""
    with path.open() as file:
        return list(csv.DictReader(file))


# --- the paper's data -------------------------------------------------------------------------------------------------


def test_every_data_file_names_its_source():
    files = sorted(p for p in paper_items.PAPER.glob("*.csv") if not p.name.startswith("kvtc_"))  # another paper
    assert len(files) >= 10
    for path in files:
        first = path.read_text().splitlines()[0]
        assert first.startswith("# Source: ") and "2611.11319v1" in first, path.name


def test_appendix_c_is_complete_and_gives_the_means_that_the_paper_prints():
    rows = paper_items.paper_table("appendix_c")
    assert len(rows) == 3 * 2 * 3 * 9  # models, lengths, rates, tasks

    def mean(model, benchmark, context, rate, method):
        here = (model, benchmark, context, rate)
        found = [r[method] for r in rows if (r["model"], r["benchmark"], r["context_k"], r["rate"]) == here]
        return round(sum(found) / len(found), 1)

    assert mean("Qwen3-4B", "RULER", 32, 16, "poissoncomp") == 59.2
    assert mean("Qwen3.5-9B", "LOFT", 32, 32, "verkv") == 56.8
    assert mean("Ministral-3-8B", "RULER", 128, 8, "verkv_fastkvzip") == 64.8
    assert mean("Ministral-3-8B", "LOFT", 128, 16, "kvzip") == 8.0


def test_appendix_c_gives_what_the_introduction_says_of_table_1():
    stated = {(row["quantity"], row["rate"]): row for row in paper_items.paper_table("table1_stated")}
    for rate in (8.0, 32.0):
        told = stated["verkv_fastkvzip quality", rate]["low"]
        assert round(paper_items.paper_fraction("verkv_fastkvzip", rate)) == told
    evicted = stated["kvzip and fastkvzip quality", 32.0]
    models = dict.fromkeys(row["model"] for row in paper_items.paper_table("appendix_c"))
    shares = [paper_items.paper_fraction(m, 32.0, model) for m in ("kvzip", "fastkvzip") for model in models]
    assert (round(min(shares)), round(max(shares))) == (evicted["low"], evicted["high"])


def test_names_of_models_and_tasks():
    assert paper_items.paper_model("Qwen/Qwen3-4B-Instruct-2507") == "Qwen3-4B"
    assert paper_items.paper_model("SmolLM2-135M-Instruct") is None
    assert {row["task"] for row in paper_items.paper_table("appendix_c")} == set(paper_items.TASKS)


# --- scripts that read answers ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Made-up answers, with a sweep of tolerances."""
    tasks = ("niah_single_2", "niah_multikey_1", "niah_multivalue", "loft_nq")
    lines = answers(2, tasks=tasks, epsilons=(0.01, 0.05, 0.1, 0.3))
    return write(tmp_path_factory.mktemp("results") / "results.jsonl", lines)


@pytest.mark.parametrize("name", FROM_ANSWERS)
def test_a_script_shows_answers_beside_the_papers(name, results, tmp_path, capsys):
    module = script(name)
    output = tmp_path / f"{name}.csv"
    given = ["--no-run", "--results", str(results), "--output", str(output)]
    module.run(paper_items.answer_parser(module.__doc__, name).parse_args(given))
    printed = capsys.readouterr().out
    assert "paper" in printed or name == "figure4_tolerance"  # whose made-up answers have one delta only
    assert read_csv(output)
    assert output.with_suffix(".svg").read_bytes().startswith(b"<?xml")
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_table_1_averages_settings_and_gives_the_papers_mean(results, tmp_path):
    lines = [line for line in answers(2, tasks=("vt", "loft_nq")) if line["method"] in ("dense", "kvzip")]
    scores = {("dense", "vt"): 1.0, ("kvzip", "vt"): 0.5, ("dense", "loft_nq"): 0.5, ("kvzip", "loft_nq"): 0.0}
    for line in lines:
        line["score"] = scores[line["method"], line["task"]]
    (row,) = [row for row in script("table1_quality").rows_of(lines) if row["rate"] == 16.0]
    assert row["quality %"] == pytest.approx(25.0)  # RULER keeps a half, LOFT nothing
    assert row["paper's quality %"] == pytest.approx(paper_items.paper_fraction("kvzip", 16.0))
    assert row["on device %"] == pytest.approx(6.25)


def test_figure_4_compares_its_facts_with_the_papers():
    read = {(0.02, 0.01): 30.0, (0.02, 0.3): 1.0, (0.1, 0.01): 20.0, (0.1, 0.3): 0.5}
    rows = [{"delta": d, "epsilon": e, "KV read/token %": v, "score - dense": -e} for (d, e), v in read.items()]
    found = {row["quantity"]: (row["ours"], row["paper"]) for row in script("figure4_tolerance").facts(rows)}
    assert found["traffic at epsilon 0.01 over traffic at 0.3"] == ("40 to 40", "43 to 43")
    assert found["traffic at delta 0.02 over traffic at delta 0.1"] == ("1.5 to 2", "1.2 to 1.9")
    assert script("figure4_tolerance").facts(rows[:3]) == []


def test_missing_answers_are_run(monkeypatch, results):
    seen = []
    monkeypatch.setattr("verkv.evaluation.runner.run_eval", seen.append)
    options = paper_items.answer_parser("", "x").parse_args(["--results", str(results)])
    paper_items.answers(options, methods=("verkv",), compression=[16.0], epsilon=[0.05], tasks=["niah_single_2"])
    (settings,) = seen
    assert settings.output == results
    assert {m.name for grid in settings.grids for m in grid.methods} == {"dense", "verkv"}
    assert {task for grid in settings.grids for task in grid.tasks} == {"niah_single_2"}


def test_only_fitting_answers_are_used(results):
    options = paper_items.answer_parser("", "x").parse_args(["--results", str(results), "--no-run"])
    lines = paper_items.answers(options, methods=("verkv",), compression=[16.0], epsilon=[0.05])
    assert {(line["method"], line["compression"], line["epsilon"]) for line in lines} == {
        ("dense", 1.0, None),
        ("verkv", 16.0, 0.05),
    }


@pytest.mark.parametrize("preset", ["laptop", "paper"])
@pytest.mark.parametrize("name", FROM_ANSWERS)
def test_settings_of_both_presets_can_be_run(name, preset, monkeypatch, results):
    """What a script would run is accepted by the runner's own checks of settings."""
    seen = []
    monkeypatch.setattr("verkv.evaluation.runner.run_eval", seen.append)
    monkeypatch.setattr(paper_items, "write", lambda *_: None)
    module = script(name)
    monkeypatch.setattr(module, "write", lambda *_: None)
    options = paper_items.answer_parser("", name).parse_args(["--preset", preset, "--results", str(results)])
    try:
        module.run(options)
    except ValueError as error:
        assert "no answers of dense" in str(error)  # of the paper's models, in the made-up file
    assert seen[0].grids and (preset == "laptop" or "Qwen" in seen[0].models[0])


def test_bad_input_ends_with_one_line_and_status_2(tmp_path, capsys):
    module = script("table1_quality")
    for given in (["--no-run", "--results", str(tmp_path / "none.jsonl")], ["--n-examples", "0"]):
        options = paper_items.answer_parser("", "x").parse_args([*given, "--output", str(tmp_path / "x.csv")])
        with pytest.raises(SystemExit) as stop:
            paper_items.main(module.run, options)
        assert stop.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [*FROM_ANSWERS, *ON_THE_SPOT])
def test_every_script_explains_itself(name):
    text = script(name).__doc__
    assert f"python experiments/{name}.py\n" in text and "--preset paper" in text


# --- scripts that measure ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompt(tiny_model):
    """A scored context of a tiny model."""
    from scored_prompt import ScoredPrompt
    from transformers import DynamicCache

    from verkv.evaluation.prefix import ScoredContext

    model, generator = tiny_model("llama"), torch.Generator().manual_seed(0)
    ids = torch.randint(3, 256, (1, 800), generator=generator)
    cache, key = DynamicCache(), ("kvzip", None)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache)
    scores = {i: torch.rand(1, 2, 800, generator=generator) ** 4 for i in range(4)}
    scored = ScoredContext(cache, 800, {key: scores}, {key: 4}, {}, 1.0, {key: 2.0})
    return ScoredPrompt(model, None, "tiny", scored, key, ids, ids[:, :5])


@pytest.fixture
def options(tmp_path):
    """Of the scripts that measure."""
    found = argparse.Namespace(preset="laptop", seed=0, threads=1, rounds=3, batches=[1, 2], output=tmp_path / "x.csv")
    return found


def test_figure_2_traces_the_error_of_every_prefix():
    from verkv.estimators import binary_shrinkage, mean_squared_error

    torch.manual_seed(0)
    weights, r = torch.rand(2, 9).double() ** 3, torch.rand(2, 9).double()
    order_weights = weights * torch.rand(2, 9).double()
    residual = torch.ones(2, 9, dtype=torch.bool)
    residual[:, :2] = False
    found = script("figure2_shrinkage").curve(weights, order_weights, r, residual)
    spread = torch.where(residual, order_weights * (1 - r) / r, -1.0)
    unbiased = mean_squared_error(weights, r, torch.ones_like(r), residual)
    for n in range(8):
        shrunk = spread.argsort(descending=True)[:, :n]
        shrinkage = torch.ones_like(r).scatter(1, shrunk, r.gather(1, shrunk))
        torch.testing.assert_close(found.errors[:, n], mean_squared_error(weights, r, shrinkage, residual) / unbiased)
    deployed = mean_squared_error(weights, r, binary_shrinkage(order_weights, r, residual), residual) / unbiased
    torch.testing.assert_close(found.chosen, deployed)


def test_figure_2_by_exact_weights_is_no_worse_than_unbiased_and_than_the_sketch(prompt, options):
    module = script("figure2_shrinkage")
    curves = module.all_curves(prompt, 2, 8)
    assert list(curves) == [0, 1, 2, 3]
    for exact, sketch, residual in curves.values():
        assert residual.any()
        assert bool((exact.chosen <= 1 + 1e-9).all()) and bool((exact.chosen <= sketch.errors.amin(-1) + 1e-9).all())
    rows = module.rows_of(curves, *module.usual_row(curves))
    assert [row["weights"] for row in rows] == ["exact", "2-bit sketch", "all shrunk"]
    assert rows[2]["tokens shrunk"] == rows[2]["of"] and rows[0]["paper's"] == 0.54
    paper_items.write(options, rows, module.picture(curves, *module.usual_row(curves)))
    assert len(read_csv(options.output)) == 3


def test_figure_5_puts_violations_beside_the_papers(options):
    module = script("figure5_adherence")
    plans = ("no fetch", "exact sketch", "2-bit sketch, blind plan", "2-bit sketch, paper's plan")
    lines = [
        {"plan": plan, "alpha": alpha, "epsilon": e, "violation_rate": rate, "decisions": 100}
        for plan in plans
        for alpha in (0.0, 0.3)
        for e in module.EPSILONS
        for rate in (0.1, 0.3)  # two contexts
    ]
    rows = module.rows_of(lines)
    assert len(rows) == 32 and all(row["violations %"] == pytest.approx(20) for row in rows)
    told = {(row["plan"], row["alpha"], row["epsilon"]): row["paper's %"] for row in rows}
    assert told["exact sketch", 0.0, 0.05] == 0.7 and told["2-bit sketch, paper's plan", 0.0, 0.01] == 29
    assert told["2-bit sketch, blind plan", 0.0, 0.01] is None and told["exact sketch", 0.3, 0.05] is None
    paper_items.write(options, rows, module.picture(rows))
    assert options.output.with_suffix(".svg").exists()


def test_figure_6_puts_time_bytes_and_score_side_by_side(prompt, options):
    from decode_times import cases, timed

    module = script("figure6_latency")
    made = cases(prompt, options, (0.05, 0.5), 0.1)
    rows = module.rows_of(prompt, made, timed(prompt, options, made, 1, 3), {None: 0.0, 0.05: -1.0, 0.5: -4.0})
    assert [row["method"] for row in rows] == ["Dense (resident)", "VerKV (ε = 0.05)", "VerKV (ε = 0.5)"]
    assert rows[0]["time / dense resident"] == 1.0 and rows[0]["paper's ms"] == 5.8
    assert [row["paper's"] for row in rows] == [None, 1.6, 3.1]
    assert rows[1]["KV read/token %"] > rows[2]["KV read/token %"]
    assert all(row["ms"] is None for row in rows)  # no absolute times on a CPU
    paper_items.write(options, rows, module.picture(rows))


def test_figures_7_to_9_measure_and_draw(prompt, options, monkeypatch, capsys):
    module = script("figure7_9_system")
    monkeypatch.setattr(module, "load_prompt", lambda options: prompt)
    monkeypatch.setitem(module.EPSILONS, "laptop", (0.05, 0.5))
    module.run(options)
    assert "Figure 8" in capsys.readouterr().out
    batches, phases, link = (read_csv(options.output.with_name(f"x_{n}.csv")) for n in (7, 8, 9))
    assert {row["batch"] for row in batches} == {"1", "2"} and all(row["tokens/s"] == "" for row in batches)
    assert float(batches[1]["paper's tokens/s"]) == 13.8
    for row in phases:
        assert sum(float(row[f"{name} %"]) for name in module.PHASES) == pytest.approx(100, abs=0.01)
        assert (float(row["decide %"]) > 0) == row["method"].startswith("VerKV")
    assert float(link[0]["bytes read/step"]) == 0 < float(link[1]["bytes read/step"])
    assert float(link[1]["paper's link load %"]) == 4.4


def test_all_cases_decode_the_same_answer(prompt, options):
    from decode_times import cases, dense_answer

    made = cases(prompt, options, (0.05,), 0.1, batch=2)
    answer = [ids.expand(2, 1) for ids in dense_answer(prompt, 3)]
    for case in made:
        assert case.cache.get_seq_length() == 805  # context and question
        for ids, expected in zip(itertools.islice(case.tokens, 3), answer, strict=True):
            assert torch.equal(ids, expected)


def test_the_clock_gives_every_second_to_one_phase(monkeypatch):
    import decode_times

    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr(decode_times.time, "perf_counter", lambda: next(now))
    clock = decode_times.PhaseClock(torch.device("cpu"))
    fetch = clock.wrap(lambda: None, "fetch")
    clock.wrap(lambda: fetch(), "decide")()
    clock.switch()
    assert clock.seconds == {"decide": 2.0 + 4.0, "fetch": 3.0, "attention": 0.0, "GEMMs": 0.0, "other": 1.0 + 5.0}


def test_a_prompt_that_is_too_long_is_refused(demo_model):
    from scored_prompt import load_prompt, prompt_parser

    with pytest.raises(ValueError, match="--tokens 100000 is too long"):
        load_prompt(prompt_parser("", "x").parse_args(["--tokens", "100000"]))
