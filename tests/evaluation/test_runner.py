"""``verkv eval`` on a tiny model: one prefill for all methods, resuming, sharing among processes, bad input.

And once on the real model, in a run of seconds.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_evaluation import TASKS, character_tokenizer, save_model
from transformers import DynamicCache

from verkv import cli
from verkv.evaluation import decoding, plan, runner
from verkv.evaluation.loading import Share
from verkv.evaluation.methods import Method, Protection, Setting, make_press
from verkv.evaluation.prefix import score_context
from verkv.evaluation.prompts import PromptEncoder
from verkv.evaluation.results import ResultsFile, read_results
from verkv.evaluation.settings import make_settings

METHODS = ["dense", "kvzip", "poissoncomp", {"verkv": {"shortlist": 4}}, "verkv_exact", "kvpress:KnormPress"]
VALUES = {
    "tasks": ["own", "shared"],
    "n_tokens": 400,
    "n_examples": 2,
    "max_new_tokens": 6,
    "methods": METHODS,
    "compression": [2, 4],
    "seeds": [0, 1],
    "n_sink": 2,
    "n_local": 4,
}
# Settings of each question: kvzip and Knorm have two rates, the sampled ones two draws each.
N_SETTINGS = 1 + 2 + 4 + 4 + 4 + 2


@pytest.fixture(autouse=True)
def _tasks(monkeypatch):
    monkeypatch.setitem(sys.modules, "verkv.evaluation.tasks", TASKS)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "VERKV_DATA"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    model = tiny_model("llama", num_hidden_layers=2, initializer_range=0.1)
    return save_model(model, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def settings(folder):
    def build(output, **values):
        return make_settings(VALUES | {"models": [folder], "output": str(output)} | values, {}, TASKS.TASKS)

    return build


@pytest.fixture(scope="module")
def complete(settings, tmp_path_factory):
    """The lines of a whole run, and its file's bytes."""
    path = tmp_path_factory.mktemp("complete") / "r.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "verkv.evaluation.tasks", TASKS)
        runner.run_eval(settings(path), Share())
    return read_results(path)


def without_timing(lines) -> list[dict]:
    return [{name: value for name, value in line.items() if name != "timing"} for line in lines]


def by_id(lines) -> dict[str, dict]:
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line for line in without_timing(lines)}


# --- what is in the file ----------------------------------------------------------------------------------------------


def test_every_question_has_every_setting_once(complete):
    assert len(complete) == 2 * 2 * N_SETTINGS
    names = ("task", "example", "label", "compression", "epsilon", "delta", "seed")
    assert len({tuple(line[name] for name in names) for line in complete}) == len(complete)
    assert {line["label"] for line in complete} == {
        "Dense", "KVzip top-k", "PoissonComp", "VerKV (2-bit)", "VerKV (exact)", "Knorm",
    }  # fmt: skip


def test_first_examples_come_first(complete):
    """So that a run that is stopped has some of every task; the questions of one context stay together."""
    order = list(dict.fromkeys((line["task"], line["example"]) for line in complete))
    assert order == [("own", 0), ("shared", 0), ("shared", 1), ("own", 1)]


def test_a_line_tells_everything(complete):
    line = next(line for line in complete if line["method"] == "verkv")
    assert (line["model"], line["task"], line["n_tokens"], line["data_seed"]) == ("tiny", "own", 400, 0)
    assert (line["compression"], line["epsilon"], line["delta"], line["seed"]) == (2.0, 0.05, 0.1, 0)
    assert (line["press"], line["sketch"], line["options"]["n_local"]) == ("KVzip", "rope_pair", 4)
    assert line["context_tokens"] == 126 and line["n_new_tokens"] == 6 and len(line["prediction"]) <= 6
    assert line["score"] == TASKS.score("own", line["prediction"], line["answers"])
    assert line["stats"]["forward_passes"] == 6 and line["stats"]["sealed_layers"] == 2
    assert torch.tensor(line["by_head"]["fetch_rate"]).shape == (2, 4)
    assert set(line["versions"]) == {"verkv", "torch", "transformers", "kvpress", "python"}
    assert (line["device"], line["dtype"]) == ("cpu", "float32")
    assert set(line["timing"]) == {"prefill_s", "score_s", "seal_s", "question_s", "decode_s_per_token"}
    memory = line["memory"]
    assert memory["host"] == memory["full"] == 126 * 2 * 2 * 2 * 16 * 4
    assert memory["device"] < 0.6 * memory["full"]


def test_memory_of_dense_and_foreign(complete):
    dense, foreign = (next(x for x in complete if x["label"] == name) for name in ("Dense", "Knorm"))
    assert dense["memory"]["device"] == dense["memory"]["full"] == foreign["memory"]["full"]
    assert foreign["memory"]["device"] == foreign["memory"]["full"] / 2
    assert foreign["stats"] == dense["stats"] == {}


def test_dense_does_not_diverge_from_itself(complete):
    dense = [line for line in complete if line["method"] == "dense"]
    assert all(line["divergence"] == {"kl": 0.0, "same_next": 1.0, "n_tokens": 6} for line in dense)
    others = [line["divergence"]["kl"] for line in complete if line["label"] in ("KVzip top-k", "PoissonComp", "Knorm")]
    assert min(others) > 1e-4


def test_draws_differ_between_contexts_and_seeds(complete):
    sampled = [line for line in complete if line["method"] == "poissoncomp" and line["compression"] == 4.0]
    sizes = {(line["task"], line["example"], line["seed"]): line["memory"]["device"] for line in sampled}
    assert sizes["shared", 0, 0] == sizes["shared", 1, 0]  # one context, sealed once
    assert len(set(sizes.values())) == 6


def test_verkv_with_everything_read_is_dense(settings, tmp_path):
    values = {"methods": ["dense", "verkv_everything"], "tasks": ["own"], "n_examples": 1, "seeds": 0}
    runner.run_eval(settings(tmp_path / "r.jsonl", **values), Share())
    dense, *everything = read_results(tmp_path / "r.jsonl")
    for line in everything:
        assert line["prediction"] == dense["prediction"] and abs(line["divergence"]["kl"]) < 1e-6
        assert line["stats"]["decode_fetch_rate"] > 0.9


def test_audit(settings, tmp_path):
    values = {"audit": True, "tasks": ["own"], "n_examples": 1, "seeds": 0, "compression": 4}
    runner.run_eval(settings(tmp_path / "r.jsonl", **values), Share())
    audits = {line["method"]: line.get("audit") for line in read_results(tmp_path / "r.jsonl")}
    assert audits["dense"] is audits["kvpress:KnormPress"] is None
    assert audits["kvzip"]["violation_rate"] is None and "pairs" not in audits["poissoncomp"]
    exact = audits["verkv_exact"]
    assert exact["violation_rate"] < 0.05 < audits["kvzip"]["output_error_q90"]
    assert 128 < len(exact["pairs"]) <= 256
    assert all(error <= max(0.05, bound) for bound, error in exact["pairs"])


FOREIGN = ["SnapKVPress", "ObservedAttentionPress", "TOVAPress", "CompactorPress", "ExpectedAttentionPress"]


def test_kvpress_own_methods_stand_in_the_same_table(settings, tmp_path):
    """Also H2O, which needs another attention implementation, and only in its prefill."""
    options = {"SnapKVPress": {"window_size": 8}}
    methods = [{f"kvpress:{name}": options.get(name, {})} for name in FOREIGN]
    runner.run_eval(settings(tmp_path / "r.jsonl", methods=methods, tasks=["own"], compression=4), Share())
    lines = read_results(tmp_path / "r.jsonl")
    assert [line["label"] for line in lines[:5]] == [
        "SnapKV",
        "ObservedAttention",
        "TOVA",
        "Compactor",
        "ExpectedAttention",
    ]
    assert all(line["divergence"]["kl"] > 1e-3 for line in lines)
    assert {line["memory"]["device"] / line["memory"]["full"] for line in lines} == {31 / 126}


# --- one prefill for all ----------------------------------------------------------------------------------------------


def test_each_context_is_prefilled_once(settings, tmp_path, monkeypatch):
    """And once more for every rate of a foreign press, whose hooks act in prefill."""
    prefilled, load = [], runner.load_model

    def watched(*args):
        model = load(*args)
        backbone = model.model

        def see(module, args, kwargs):
            if kwargs["past_key_values"].get_seq_length() == 0:
                prefilled.append(kwargs["input_ids"].shape[1])

        backbone.register_forward_pre_hook(see, with_kwargs=True)
        return model

    monkeypatch.setattr(runner, "load_model", watched)
    runner.run_eval(settings(tmp_path / "r.jsonl"), Share())
    n_contexts, n_foreign = 3, 2
    assert prefilled == [126] * n_contexts * (1 + n_foreign)


def test_questions_leave_no_trace(settings, tmp_path, complete):
    """The second question of a shared context is answered as if it were the only one, statistics included."""
    path = tmp_path / "r.jsonl"
    results = ResultsFile(path)
    for line in complete:
        if (line["task"], line["example"]) != ("shared", 1):
            results.append(line)
    assert runner.run_eval(settings(path), Share()) == N_SETTINGS
    assert by_id(read_results(path)) == by_id(complete)


def test_masks_of_a_head_wise_press_are_gone(settings, tmp_path, complete, monkeypatch):
    """KVPress leaves them on the attention modules, where they would change what runs next."""
    # It hides a token behind a key that no query likes, and random models have no such key.
    monkeypatch.setattr("kvpress.attention_patch.search_hyperplane", lambda queries: -10.0 * queries.mean(1))
    monkeypatch.setattr(runner, "QUESTIONS_AT_ONCE", 1)  # dense attention comes again for the second question
    path = tmp_path / "r.jsonl"
    adakv = {"kvpress:AdaKVPress": {"press": "KnormPress"}}
    methods = [*METHODS, adakv]
    runner.run_eval(settings(path, methods=methods, tasks=["shared"]), Share())
    lines = read_results(path)
    alone, masked = {x["id"]: x for x in complete}, [x for x in lines if x["method"] == "kvpress:AdaKVPress"]
    assert len(masked) == 4 and all("leaves them in memory" in x["notes"][0] for x in masked)
    assert all(x["divergence"]["kl"] > 1e-4 for x in masked)
    others = [x for x in lines if x["method"] != "kvpress:AdaKVPress"]
    assert without_timing(others) == without_timing(alone[x["id"]] for x in others)


@pytest.fixture
def gates(tmp_path):
    """Random gates of Fast KVzip for the tiny model, in a file."""
    from kvpress.presses.fastkvzip_press import FastKVzipGate

    made = [FastKVzipGate(i, 64, 2, 2, torch.float32, sink=16) for i in range(2)]
    for gate in made:
        torch.nn.init.normal_(gate.k_base)
        torch.nn.init.normal_(gate.b)
    torch.save({"module": [gate.state_dict() for gate in made]}, tmp_path / "gates.pt")
    return str(tmp_path / "gates.pt")


@pytest.mark.parametrize("name", ["kvzip", "fastkvzip", "poissoncomp", "verkv", "verkv_default", "verkv_fastkvzip"])
def test_sealing_a_shared_prefix_is_what_the_press_does_alone(tiny_model, gates, name):
    """Scored together with all others, and prefilled with the press' own hooks: the same tokens stay."""
    model, tokenizer = tiny_model("llama", num_hidden_layers=2), character_tokenizer()
    ids = PromptEncoder(tokenizer).context(TASKS.build_examples("own", None, 400, 1)[0]["context"])
    options = {"gates": gates} if "fastkvzip" in name else {}
    setting = Setting(Method(name, options), 4.0, 0.05, 0.1, 0)
    make = lambda: make_press(setting, Protection(2, 4), draw_seed=5)  # noqa: E731
    scored = score_context(model, tokenizer, ids, [("kvzip", None), ("fastkvzip", gates)])
    assert set(scored.score_seconds) == {("kvzip", None), ("fastkvzip", gates)}
    shared = scored.sealed(model, make(), setting.method.source)

    alone, press = DynamicCache(), make()
    getattr(press, "press", press).tokenizer = tokenizer
    with torch.inference_mode(), press(model):
        model.model(input_ids=ids, past_key_values=alone)
    for one, other in zip(shared.layers, alone.layers, strict=True):
        assert torch.equal(one.context.rows.codes, other.context.rows.codes)
        assert torch.equal(one.context.rows.keys, other.context.rows.keys)


@pytest.mark.parametrize("name", ["dense", "KnormPress", "SnapKVPress", "KeyRerotationPress"])
def test_answers_are_those_of_kvpress_pipeline(settings, folder, tmp_path, name):
    import kvpress
    from transformers import AutoModelForCausalLM

    press, method = None, "dense"
    if name == "KeyRerotationPress":
        press = kvpress.KeyRerotationPress(kvpress.KnormPress(0.5))
        method = {f"kvpress:{name}": {"press": "KnormPress"}}
    elif name != "dense":
        options = {"window_size": 8} if name == "SnapKVPress" else {}
        press, method = getattr(kvpress, name)(compression_ratio=0.5, **options), {f"kvpress:{name}": options}
    values = {"methods": [method], "compression": 2, "tasks": ["own"]}
    runner.run_eval(settings(tmp_path / "r.jsonl", **values), Share())
    model = AutoModelForCausalLM.from_pretrained(folder)
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=character_tokenizer())
    rows = TASKS.build_examples("own", None, 400, 2)
    for line, row in zip(read_results(tmp_path / "r.jsonl"), rows, strict=True):
        expected = pipe(
            row["context"], question=row["question"], answer_prefix=row["answer_prefix"], press=press, max_new_tokens=6
        )
        assert line["prediction"] == expected["answer"]


class TestDivergence:
    """Against a plain computation: a cache of its own, dense attention's tokens one at a time."""

    @pytest.fixture
    def parts(self, tiny_model):
        torch.manual_seed(0)
        model, tokenizer = tiny_model("llama", num_hidden_layers=2, initializer_range=0.1), character_tokenizer()
        encoder = PromptEncoder(tokenizer)
        ids = encoder.context(TASKS.build_examples("own", None, 400, 1)[0]["context"])
        scored = score_context(model, tokenizer, ids, [("kvzip", None)])
        asked = torch.randint(10, 90, (1, 7))
        return model, scored, decoding.Question(asked, ids.shape[1], 8, frozenset())

    def plain(self, model, cache, question, tokens):
        with torch.inference_mode():
            logits = [model(input_ids=question.input_ids, past_key_values=cache).logits[0, -1]]
            for token in tokens[:-1]:
                logits.append(model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
        return torch.stack(logits)

    @pytest.mark.parametrize("name", ["kvzip", "poissoncomp", "verkv", "verkv_exact"])
    def test_of_a_sealed_cache(self, parts, name):
        model, scored, question = parts
        dense = decoding.Reference.of(decoding.decode(model, scored.fork(), question))
        press = make_press(Setting(Method(name), 4.0, 0.3, 0.1, 0), Protection(2, 4))
        cache = scored.sealed(model, press, ("kvzip", None))
        lengths = [layer.get_seq_length() for layer in cache.layers]
        answer = decoding.decode(model, cache, question)
        found = decoding.divergence(model, cache, question, lengths, answer, dense)

        expected = self.plain(model, scored.sealed(model, press, ("kvzip", None)), question, dense.tokens)
        p = self.plain(model, scored.fork(), question, dense.tokens)
        log_q, log_p = (logits.double().log_softmax(-1) for logits in (expected, p))
        kl = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
        assert found.kl == pytest.approx(float(kl), rel=1e-4) and found.kl > 1e-5
        assert found.same_next == float((expected.argmax(-1) == p.argmax(-1)).float().mean())
        decoding.roll_back(cache, lengths)
        assert [layer.get_seq_length() for layer in cache.layers] == lengths

    def test_an_answer_that_ends_early(self, parts):
        """The rest of dense attention's answer counts all the same; and a longer one is cut."""
        model, scored, question = parts
        whole = decoding.decode(model, scored.fork(), question)
        stop = decoding.Question(question.input_ids, question.position, 8, frozenset(whole.tokens[2:3]))
        short = decoding.decode(model, scored.fork(), stop)
        assert len(short.tokens) < len(whole.tokens)
        for answer, reference in ((short, whole), (whole, short)):
            cache = scored.fork()
            lengths = [layer.get_seq_length() for layer in cache.layers]
            decoding.decode(model, cache, stop if answer is short else question)
            found = decoding.divergence(model, cache, question, lengths, answer, decoding.Reference.of(reference))
            assert found.n_tokens == len(reference.tokens)
            assert found.kl == pytest.approx(0.0, abs=1e-6) and found.same_next == 1.0

    def test_a_state_that_cannot_go_back_starts_from_the_context(self, tiny_model):
        """Linear-attention layers remember only some lengths."""
        model, tokenizer = tiny_model("qwen3_next"), character_tokenizer()
        ids = torch.randint(10, 90, (1, 90))
        scored = score_context(model, tokenizer, ids, [("kvzip", None)])
        question = decoding.Question(torch.randint(10, 90, (1, 7)), 90, 8, frozenset())
        dense = decoding.Reference.of(decoding.decode(model, scored.fork(), question))
        press = make_press(Setting(Method("kvzip"), 8.0), Protection(2, 4))
        cache = scored.sealed(model, press, ("kvzip", None))
        lengths = [layer.get_seq_length() for layer in cache.layers]
        answer = decoding.decode(model, cache, question)
        assert answer.tokens != dense.tokens
        found = decoding.divergence(model, cache, question, lengths, answer, dense)
        expected = self.plain(model, scored.sealed(model, press, ("kvzip", None)), question, dense.tokens)
        assert found.kl == pytest.approx(decoding.compare(expected, dense.logits).kl, rel=1e-3)


def test_a_fork_leaves_the_context_alone(tiny_model):
    model = tiny_model("llama")
    ids = torch.randint(3, 90, (1, 60))
    scored = score_context(model, character_tokenizer(), ids, [])
    before = [layer.keys.clone() for layer in scored.cache.layers]
    decoding.decode(model, scored.fork(), decoding.Question(ids[:, :5], 60, 4, frozenset()))
    plain = DynamicCache()
    with torch.inference_mode():
        model.model(input_ids=ids, past_key_values=plain)
    for layer, keys, expected in zip(scored.cache.layers, before, plain.layers, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(keys, expected.keys)


# --- stopping, resuming, sharing --------------------------------------------------------------------------------------


def test_same_seed_same_file(settings, tmp_path, complete):
    runner.run_eval(settings(tmp_path / "r.jsonl"), Share())
    assert without_timing(read_results(tmp_path / "r.jsonl")) == without_timing(complete)


def test_a_finished_run_does_nothing(settings, tmp_path, complete, monkeypatch):
    path = tmp_path / "r.jsonl"
    results = ResultsFile(path)
    for line in complete:
        results.append(line)
    before = path.read_bytes()
    monkeypatch.setattr(runner, "load_model", None)  # not even the model is loaded
    assert runner.run_eval(settings(path), Share()) == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("place", ["in the first line", "after a line", "newline missing", "in a context", "last byte"])
def test_a_killed_run_goes_on_where_it_was(settings, tmp_path, complete, place):
    path = tmp_path / "r.jsonl"
    lines = [json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in complete]
    left = {
        "in the first line": lines[0][:100],
        "after a line": b"".join(lines[:N_SETTINGS]),
        "newline missing": b"".join(lines[:3])[:-1],
        "in a context": b"".join(lines[: 2 * N_SETTINGS + 5]) + lines[2 * N_SETTINGS + 5][:200],
        "last byte": b"".join(lines)[:-1],
    }[place]
    path.write_bytes(left)
    n_missing = len(lines) - left.count(b"\n")
    assert runner.run_eval(settings(path), Share()) == n_missing
    assert without_timing(read_results(path)) == without_timing(complete)
    assert path.read_bytes().startswith(left[: left.rfind(b"\n") + 1])


def test_stopping_between_any_two_lines(settings, tmp_path, complete, monkeypatch):
    """A run is broken off before every line in turn, and goes on: nothing is lost, nothing is there twice."""
    path, n_runs = tmp_path / "r.jsonl", 0
    values = {"tasks": ["shared"], "methods": ["dense", "kvzip", "verkv_exact"], "compression": 4, "seeds": 0}
    append = ResultsFile.append

    def append_one(self, line, written=[]):  # noqa: B006
        if written and written[-1] == n_runs:
            raise KeyboardInterrupt
        written.append(n_runs)
        return append(self, line)

    monkeypatch.setattr(ResultsFile, "append", append_one)
    while len(read_results(path) if path.exists() else []) < 6:
        n_runs += 1
        try:
            runner.run_eval(settings(path, **values), Share())
        except KeyboardInterrupt:
            continue
    assert n_runs == 6
    expected = by_id(complete)
    assert all(expected[x["id"]] == x for x in without_timing(read_results(path)))


def test_processes_share_the_contexts(settings, tmp_path, complete):
    path = tmp_path / "r.jsonl"
    written = [runner.run_eval(settings(path), Share(rank, 2, rank)) for rank in (1, 0)]
    assert sum(written) == len(complete) and min(written) > 0
    assert by_id(read_results(path)) == by_id(complete)


def test_the_number_of_processes_may_change(settings, tmp_path, complete):
    path = tmp_path / "r.jsonl"
    runner.run_eval(settings(path), Share(1, 2, 1))
    runner.run_eval(settings(path), Share())
    assert by_id(read_results(path)) == by_id(complete)


def test_a_run_is_extended_without_repeating(settings, tmp_path, complete):
    path = tmp_path / "r.jsonl"
    assert runner.run_eval(settings(path, n_examples=1), Share()) == 2 * N_SETTINGS
    first = path.read_bytes()
    assert runner.run_eval(settings(path), Share()) == 2 * N_SETTINGS
    assert path.read_bytes().startswith(first)
    assert by_id(read_results(path)) == by_id(complete)


CHANGES = [{"n_sink": 3}, {"data_seed": 1}, {"max_new_tokens": 5}, {"audit": True}, {"seeds": [2]}, {"epsilon": 0.2}]


@pytest.mark.parametrize("changed", CHANGES, ids=str)
def test_what_changes_an_answer_changes_its_id(settings, folder, changed):
    from verkv.evaluation.loading import find_model

    def ids(**values):
        values = {"methods": ["verkv"], "tasks": ["own"], "output": "r.jsonl"} | values
        made = settings(**values)
        return {job.id for p in plan.plan_model(made, find_model(folder), TASKS, Share()) for job in p.jobs}

    assert not ids() & ids(**changed)
    assert ids() == ids(methods=[{"verkv": {"label": "another name"}}])


@pytest.mark.parametrize("environment", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x"}])
def test_a_senseless_environment_is_refused(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="RANK"):
        Share.from_environment()


# --- the command ------------------------------------------------------------------------------------------------------


def command(folder, output, *extra) -> list[str]:
    words = f"eval --tasks own --n-tokens 400 --n-examples 1 --methods dense kvzip --max-new-tokens 4 --model {folder}"
    return [*words.split(), "--output", str(output), *extra]


def test_command(folder, tmp_path, capsys):
    output = tmp_path / "new" / "r.jsonl"
    assert cli.main(command(folder, output)) == 0
    assert capsys.readouterr().out == f"2 answers added to {output}\n"
    assert [line["method"] for line in read_results(output)] == ["dense", "kvzip"]


def test_settings_file_and_flags(folder, tmp_path):
    import yaml

    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump(VALUES | {"models": [folder], "output": str(tmp_path / "r.jsonl")}))
    arguments = ["eval", "--config", str(file), "--methods", "dense", "--tasks", "shared", "--max-new-tokens", "2"]
    assert cli.main(arguments) == 0
    assert [line["n_new_tokens"] for line in read_results(tmp_path / "r.jsonl")] == [2, 2]


BAD_INPUT = {
    "unknown task": (["--tasks", "vtt"], "no task 'vtt'"),
    "unknown method": (["--methods", "snapkv"], "no method 'snapkv'"),
    "unknown press": (["--methods", "kvpress:Nothing"], "no press 'Nothing'"),
    "too short for the task": (["--n-tokens", "50"], "too short for task own"),
    "no data": (["--tasks", "needs_data"], "needs a folder with its data"),
    "no such data folder": (["--data-dir", "no/such/folder"], "is not a folder"),
    "longer than the window": (["--n-tokens", "5000"], "takes 4096 tokens"),
    "impossible budget": (["--methods", "verkv", "--compression", "30"], "protected tokens"),
    "no such model": (["--model", "no/such/model"], "cannot be loaded"),
    "no such device": (["--device", "cuda:99"], "device 'cuda:99' cannot be used"),
    "no such dtype": (["--dtype", "int8"], "dtype must be auto"),
    "offloading needs a bus": (["--methods", "dense_offloaded", "--device", "cpu"], "needs a CUDA device"),
    "no such preset": (["--preset", "huge"], "no preset 'huge'"),
    "no such file": (["--config", "no/such.yaml"], "cannot be read"),
    "no rate": (["--compression", "0"], "compression must be"),
}


@pytest.mark.parametrize(("extra", "complaint"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input(folder, tmp_path, capsys, extra, complaint):
    """One line that says what is wrong, status 2, no file."""
    assert cli.main(command(folder, tmp_path / "new" / "r.jsonl", *extra)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("verkv eval: ") and err.count("\n") == 1
    assert complaint in err
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_chat_template(tiny_model, tmp_path, capsys):
    folder = save_model(tiny_model("llama"), tmp_path / "plain", chat_template=None)
    assert cli.main(command(folder, tmp_path / "r.jsonl")) == 2
    assert "no chat template" in capsys.readouterr().err
    assert not (tmp_path / "r.jsonl").exists()


def test_a_prompt_that_outgrows_the_window(tiny_model, tmp_path, capsys):
    """The length asked for fits, what the task made of it does not."""
    folder = save_model(tiny_model("llama", max_position_embeddings=140), tmp_path / "narrow")
    assert cli.main([*command(folder, tmp_path / "r.jsonl"), "--n-tokens", "130"]) == 2
    assert "but narrow takes 140" in capsys.readouterr().err


def test_an_output_of_something_else(folder, tmp_path, capsys):
    (tmp_path / "notes.md").write_text("# Notes\n")
    assert cli.main(command(folder, tmp_path / "notes.md")) == 2
    assert (tmp_path / "notes.md").read_text() == "# Notes\n"


def test_a_method_that_fails_is_named(folder, tmp_path, capsys):
    """What was answered before stays; the next run goes on behind it."""
    failing = ["--methods", "dense", "kvpress:FinchPress"]  # which wants a delimiter in the context
    assert cli.main([*command(folder, tmp_path / "r.jsonl"), *failing]) == 1
    err = capsys.readouterr().err
    assert "method kvpress:FinchPress failed on task own, example 0" in err and err.count("\n") == 1
    assert [line["method"] for line in read_results(tmp_path / "r.jsonl")] == ["dense"]


KILLED = """
import sys
sys.path.insert(0, {helpers!r})
from tiny_evaluation import TASKS
sys.modules["verkv.evaluation.tasks"] = TASKS
from verkv import cli
sys.exit(cli.main({arguments!r}))
"""


@pytest.mark.slow
def test_a_killed_process(folder, tmp_path):
    """SIGKILL in the middle of a run, then the same command again, against a run that was left alone."""
    helpers = str(Path(__file__).parents[1] / "helpers")
    extra = ["--n-examples", "3", "--methods", "dense", "kvzip", "verkv_exact", "--compression", "2", "4"]
    killed, alone = tmp_path / "killed.jsonl", tmp_path / "alone.jsonl"
    code = {path: KILLED.format(helpers=helpers, arguments=command(folder, path, *extra)) for path in (killed, alone)}
    process = subprocess.Popen([sys.executable, "-c", code[killed]])
    deadline = time.monotonic() + 120
    while not (killed.exists() and killed.read_bytes().count(b"\n") >= 4):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    n_before = killed.read_bytes().count(b"\n")
    assert 4 <= n_before < 15
    for path in (killed, alone):
        subprocess.run([sys.executable, "-c", code[path]], check=True, env=os.environ | {"TQDM_DISABLE": "1"})
    assert without_timing(read_results(killed)) == without_timing(read_results(alone))


@pytest.mark.slow
def test_torchrun(folder, tmp_path, complete):
    """Two real processes write one file at once."""
    helpers = str(Path(__file__).parents[1] / "helpers")
    extra = ["--n-examples", "3", "--tasks", "own", "shared"]
    script = tmp_path / "run.py"
    script.write_text(KILLED.format(helpers=helpers, arguments=command(folder, tmp_path / "r.jsonl", *extra)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    subprocess.run(launch, check=True, env=os.environ | {"TQDM_DISABLE": "1"}, timeout=300)
    assert cli.main(command(folder, tmp_path / "alone.jsonl", *extra)) == 0
    assert by_id(read_results(tmp_path / "r.jsonl")) == by_id(read_results(tmp_path / "alone.jsonl"))


@pytest.mark.slow
@pytest.mark.real_model
def test_quick_run_of_the_real_model(tmp_path, monkeypatch, capsys):
    """The quick preset, cut down further: the whole way from a real task to scores and divergences."""
    monkeypatch.delitem(sys.modules, "verkv.evaluation.tasks")
    output = tmp_path / "r.jsonl"
    arguments = ["--tasks", "niah_single_1", "--n-tokens", "700", "--max-new-tokens", "8", "--output", str(output)]
    assert cli.main(["eval", "--quick", *arguments]) == 0
    lines = {line["method"]: line for line in read_results(output)}
    assert set(lines) == {"dense", "kvzip", "poissoncomp", "verkv", "verkv_exact", "kvpress:SnapKVPress"}
    assert lines["dense"]["model"] == "SmolLM2-135M-Instruct" and lines["dense"]["score"] == 1.0
    assert lines["verkv_exact"]["score"] == 1.0
    kl = {name: line["divergence"]["kl"] for name, line in lines.items()}
    assert kl["dense"] == 0 < kl["verkv_exact"] < 0.05 * kl["poissoncomp"]
    assert lines["verkv"]["stats"]["kv_read_per_token"] > 0
