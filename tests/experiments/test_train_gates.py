"""Training of Fast KVzip's gates: texts, stored documents, gates that learn, their file, the whole script."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from press_helpers import full_layers, prefill, random_ids
from tiny_evaluation import character_tokenizer, save_model

sys.path.append(str(Path(__file__).resolve().parents[2] / "experiments"))  # scripts import each other

pytest.importorskip("kvpress", reason="gates are modules of KVPress")
stats = pytest.importorskip("scipy.stats", reason="the evaluation of gates needs SciPy")

import gate_data  # noqa: E402
import gate_evaluation  # noqa: E402
import gate_training  # noqa: E402
import train_gates  # noqa: E402
from gate_training import GateOptions  # noqa: E402
from kvpress import ExpectedAttentionPress, KnormPress  # noqa: E402

from verkv import FastKVzipPress, KVzipPress, make_cache  # noqa: E402

N_LAYERS, HIDDEN, N_KV_HEADS, GROUP = 4, 64, 2, 2  # of the tiny Llama
SMALL = GateOptions(dim=4, sink=4, epochs=8, batch=128, rate=1e-2)


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")


def new_gates(model, options=SMALL):
    return {i: gate_training.new_gate(i, model.config, options) for i in gate_data.attention_modules(model)}


def prepared_source(model):
    source = KVzipPress(tokenizer=character_tokenizer()).source()
    source.prepare(model)
    return source


# --- texts ------------------------------------------------------------------------------------------------------------


def passages(document: list[int]) -> set[tuple[int, ...]]:
    """All runs of 30 ids."""
    return {tuple(document[i : i + 30]) for i in range(len(document) - 29)}


def test_no_passage_is_in_training_and_in_held_out_documents():
    """Topics quote each other: what one has from another must not be on both sides."""
    tokenizer = character_tokenizer()
    shared = "A paragraph that several topics quote word by word, and that is longer than the runs compared here."
    texts = {f"t{k}": f"Paragraph number {k} of its own, {k * 7919}.\n\n{shared}\n\nThe end of {k}." for k in range(12)}
    ids = gate_data.tokenise(texts, tokenizer)
    assert sum("several topics" in tokenizer.decode(t) for t in ids.values()) == 1
    train, held_out = gate_data.split_documents(ids, 3, 2, 70, seed=0)
    assert [len(d) for d in train + held_out] == [70] * 5
    assert not set().union(*map(passages, train)) & set().union(*map(passages, held_out))
    assert not passages(held_out[0]) & passages(held_out[1])


def test_split_depends_on_the_seed_alone():
    ids = {f"t{k}": [k] * 40 for k in range(10)}
    orders = (ids.items(), 0), (reversed(ids.items()), 0), (ids.items(), 1)
    splits = [gate_data.split_documents(dict(items), 3, 2, 50, seed) for items, seed in orders]
    assert splits[0] == splits[1] != splits[2]


@pytest.mark.parametrize(("n_train", "n_held_out"), [(9, 1), (1, 9), (4, 3)])
def test_too_little_text(n_train, n_held_out):
    ids = {f"t{k}": [k] * 50 for k in range(6)}
    with pytest.raises(ValueError, match=f"{n_train} and {n_held_out} are wanted: lower --documents"):
        gate_data.split_documents(ids, n_train, n_held_out, 50, 0)


# --- stored documents -------------------------------------------------------------------------------------------------


def test_what_is_stored_is_what_the_press_and_the_replay_see(model):
    ids, scorers = random_ids(1, 60), {"knorm": KnormPress(), "expected": ExpectedAttentionPress()}
    stored = gate_data.observe(model, prepared_source(model), ids, scorers)
    entered = {}
    for i, layer in enumerate(model.model.layers):
        layer.input_layernorm.register_forward_hook(lambda m, a, out, i=i: entered.__setitem__(i, out[0]))
    cache = prefill(model, ids)
    for i in range(N_LAYERS):
        torch.testing.assert_close(stored[f"hidden.{i}"].float(), entered[i], rtol=1e-3, atol=1e-3)  # float16
        torch.testing.assert_close(stored[f"knorm.{i}"], -cache.layers[i].keys[0].norm(dim=-1))
        assert stored[f"expected.{i}"].shape == (N_KV_HEADS, 60)
    scores = prepared_source(model).after_prefill(model, cache, ids, None)
    assert all(torch.equal(stored[f"kvzip.{i}"], scores[i][0]) for i in range(N_LAYERS))
    attention = model.model.layers[0].self_attn
    assert not attention._forward_hooks and not hasattr(attention, "rotary_emb")


def test_layers_without_full_attention_have_no_gates(tiny_model):
    model = tiny_model("gemma3")
    assert list(gate_data.attention_modules(model)) == [5]
    stored = gate_data.observe(model, prepared_source(model), random_ids(1, 60), {})
    assert sorted(stored) == ["hidden.5", "ids", "kvzip.5"]


def test_documents_are_made_once_and_never_half(model, tmp_path):
    path, made = tmp_path / "d.safetensors", []

    def make():
        made.append(1)
        return {"ids": torch.arange(5)}

    def fail():
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        gate_data.store(path, fail, "a")
    assert not path.exists()
    assert gate_data.store(path, make, "a") and not gate_data.store(path, make, "a")
    assert len(made) == 1
    with pytest.raises(ValueError, match=r"--data-dir has 'd.safetensors' of another run"):
        gate_data.store(path, make, "b")


def test_fingerprint_tells_models_and_texts_apart(tiny_model):
    ids = random_ids(1, 20)
    marks = [
        gate_data.fingerprint(m, x, s)
        for m, x, s in (
            (tiny_model("llama"), ids, {}),
            (tiny_model("llama", seed=1), ids, {}),
            (tiny_model("llama"), ids + 1, {}),
            (tiny_model("llama"), ids, {"knorm": None}),
        )
    ]
    assert len(set(marks)) == 4 and marks[0] == gate_data.fingerprint(tiny_model("llama"), ids, {})


# --- gates learn ------------------------------------------------------------------------------------------------------


def planted(n_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of which a direction per head decides the score, and channels of very different sizes."""
    directions = torch.randn(N_KV_HEADS, HIDDEN, generator=torch.Generator().manual_seed(99)) / HIDDEN**0.5
    states = torch.randn(n_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
    sizes = torch.ones(HIDDEN)
    sizes[::16] = 30.0
    return states * sizes, torch.sigmoid(3.0 * directions @ states.T - 3.0)


def held_out_correlation(gate) -> float:
    hidden, targets = planted(500, seed=2)
    with torch.no_grad():
        return float(gate_evaluation.rank_correlation(gate(hidden[None])[0].numpy(), targets.numpy()).mean())


@pytest.mark.parametrize("loss", gate_training.LOSSES)
def test_a_gate_learns_a_planted_relation_and_nothing_from_shuffled_scores(model, loss):
    options = GateOptions(dim=4, sink=4, loss=loss, epochs=8, batch=128, rate=1e-2)
    hidden, targets = planted(2000, seed=1)
    shuffled = targets[:, torch.randperm(2000, generator=torch.Generator().manual_seed(3))]
    gate, control = (gate_training.new_gate(0, model.config, options) for _ in range(2))
    untrained = gate(hidden[None])[0].detach()
    losses = gate_training.train_gate(gate, hidden, targets, options)
    gate_training.train_gate(control, hidden, shuffled, options)
    assert len(losses) == 8 and losses[-1] < losses[0] < gate_training.loss_of(untrained, targets, loss)
    assert held_out_correlation(gate) > 0.8
    assert abs(held_out_correlation(control)) < 0.2


def test_training_is_repeatable_and_depends_on_the_seed(model):
    hidden, targets = planted(300, seed=1)
    weights = []
    for seed in (0, 0, 1):
        options = GateOptions(dim=4, sink=4, epochs=1, batch=100, seed=seed)
        gate = gate_training.new_gate(0, model.config, options)
        gate_training.train_gate(gate, hidden, targets, options)
        weights.append(gate.q_proj.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


# --- their file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5"])
def test_a_file_gives_a_press_the_gates_that_were_saved(tiny_model, tmp_path, kind):
    model, path = tiny_model(kind), tmp_path / "gates" / "tiny.safetensors"
    gates = new_gates(model)
    size = gate_training.save_gates(path, gates, model.config, {"seed": 0})
    assert size == path.stat().st_size
    loaded = gate_training.load_gates(path, model.config)
    assert [i for i, gate in enumerate(loaded) if gate is not None] == list(gates)
    for i, gate in gates.items():
        for name, tensor in gate.state_dict().items():
            assert torch.equal(loaded[i].state_dict()[name], tensor.half().float()), name
    caches = [
        prefill(model, random_ids(1, 80), FastKVzipPress(0.5, gates=given), make_cache(model.config))
        for given in (loaded, path)
    ]
    cache = caches[0]
    assert full_layers(cache) == full_layers(caches[1]) == list(gates)
    for i in gates:
        assert torch.equal(cache.layers[i].context.rows.codes, caches[1].layers[i].context.rows.codes)
    for i in gates:
        hidden = torch.randn(1, 7, model.config.hidden_size)
        assert loaded[i](hidden).shape == (1, cache.layers[i].context.n_kv_heads, 7)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"num_hidden_layers": 3}, r"4 layers \(the model has 3\)"),
        ({"hidden_size": 32}, r"64 hidden size \(the model has 32\)"),
        ({"num_key_value_heads": 1}, r"2 KV heads \(the model has 1\), 2 query heads per KV head \(the model has 4\)"),
    ],
    ids=["layers", "hidden", "heads"],
)
def test_gates_of_another_model_are_refused(model, tiny_model, tmp_path, other, match):
    path = tmp_path / "gates.safetensors"
    gate_training.save_gates(path, new_gates(model), model.config, {})
    with pytest.raises(ValueError, match=f"for another model, with {match}.*: train gates for this one"):
        gate_training.load_gates(path, tiny_model("llama", **other).config)


def test_files_that_hold_no_gates(model, tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match=r"x\.safetensors' is not a file"):
        gate_training.load_gates(path, model.config)
    path.write_text("not one")
    with pytest.raises(ValueError, match="does not hold Fast KVzip gates"):
        gate_training.load_gates(path, model.config)
    gate_training.save_file({"0.b": torch.zeros(1)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="does not hold Fast KVzip gates"):
        gate_training.load_gates(path, model.config)
    for n_layers in (2**60, 0, "4", None):
        described = {gate_training.FORMAT: json.dumps({"num_hidden_layers": n_layers})}
        gate_training.save_file({"0.b": torch.zeros(1)}, path, metadata=described)
        with pytest.raises(ValueError, match=r"does not hold Fast KVzip gates .*num_hidden_layers is"):
            FastKVzipPress(0.5, gates=path).source().prepare(model)


# --- measures ---------------------------------------------------------------------------------------------------------


def test_rank_correlation_is_spearmans():
    rng = np.random.default_rng(0)
    guess, truth = rng.integers(0, 9, (2, 3, 40)).astype(float)  # with ties
    expected = [stats.spearmanr(g, t).statistic for g, t in zip(guess, truth, strict=True)]
    np.testing.assert_allclose(gate_evaluation.rank_correlation(guess, truth), expected)
    assert gate_evaluation.rank_correlation(np.exp(truth), truth) == pytest.approx(1.0)


def test_overlap_of_the_top():
    truth = np.arange(20.0)[None]
    guess = truth.copy()
    guess[0, 18] = -1.0  # of the top two, one is no longer there
    assert gate_evaluation.top_overlap(guess, truth) == 0.5
    assert gate_evaluation.top_overlap(-truth, truth) == 0.0
    assert gate_evaluation.top_overlap(truth, truth, 0.3) == 1.0


def test_interval_over_documents():
    values = np.array([0.2, 0.5, 0.4, 0.7])
    mean = gate_evaluation.Mean.over(values)
    interval = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert (mean.mean, mean.low, mean.high) == pytest.approx((0.45, interval.low, interval.high))
    assert gate_evaluation.Mean.over(values[:1]) == gate_evaluation.Mean(0.2, None, None)


def test_guesses_that_need_no_gate():
    means = gate_evaluation.token_means(torch.tensor([0, 2, 2]), torch.tensor([[1.0, 2.0, 6.0]]), 4)
    assert means.tolist() == [[1.0, 3.0, 4.0, 3.0]]  # unseen ids: the mean of all
    scores = [torch.arange(100.0)[None], torch.arange(100.0)[None] + 2]
    places = gate_evaluation.position_means(scores)
    assert places.shape == (1, 100) and places[0, 50] == pytest.approx(51.0)
    assert gate_evaluation.position_means([torch.ones(2, 6)]).shape == (2, 6)


def test_a_press_that_keeps_everything_answers_as_dense_attention(model):
    tokenizer, gates = character_tokenizer(), list(new_gates(model).values())
    task = gate_evaluation.needle_task("One line.\n\nAnother line of the text.\n\nThe last.", seed=1)
    assert task.context.count(task.answer) == 1 and task.answer not in task.question
    tried = {"Fast KVzip": FastKVzipPress(0.0, gates=gates), "Fast KVzip, 10x": FastKVzipPress(0.9, gates=gates)}
    whole, tenth = gate_evaluation.check_task(model, tokenizer, task, tried)
    assert whole["same_answer"] and whole["same_next_token"] == 1.0 and abs(whole["kl"]) < 1e-5
    assert tenth["kl"] > 1e-3 and whole["n_tokens"] == tenth["n_tokens"] > len(task.context)


# --- the script -------------------------------------------------------------------------------------------------------

TEXT = "Chapter {0} speaks of {1} and of {2}.\n\nWho reads it, learns that {1} is not {2}, and why {0} comes first.\n\n"
TINY_RUN = "--documents 3 --held-out 2 --tokens 200 --dim 4 --sink 4 --epochs 2 --check 1 --compression-ratio 0.5"
TINY_RUN += " --threads 1"


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    """A tiny model with a tokenizer of characters."""
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    save_model(tiny_model("llama"), folder)
    for i in range(16):
        (folder / f"{i}.txt").write_text(TEXT.format(i, f"{i * 7919:x}", f"{i * 104729:o}"))
    return folder


def tiny_arguments(folder, out: Path) -> list[str]:
    texts = [str(path) for path in sorted(folder.glob("*.txt"))]
    return ["--model", str(folder), "--data-dir", str(out / "data"), "--text", *texts, *TINY_RUN.split()]


def run_script(folder, out: Path, capsys, *more: str) -> dict:
    """The JSON line of a run, as a dict."""
    assert train_gates.main([*tiny_arguments(folder, out), *more]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_script_trains_resumes_and_evaluates(folder, tmp_path, capsys, tiny_model, monkeypatch):
    paths = [tmp_path / f"{name}.safetensors" for name in "ab"]
    results = tmp_path / "results" / "lines.jsonl"
    first = run_script(folder, tmp_path, capsys, "--output", str(paths[0]), "--results", str(results))
    assert json.loads(results.read_text()) == first
    assert first["gates_bytes"] == paths[0].stat().st_size and len(first["losses"]) == N_LAYERS
    assert all(last < begin for begin, last in first["losses"])
    assert [row["press"] for row in first["presses"]] == ["KVzip", "Fast KVzip", "VerKV(KVzip)", "VerKV(Fast KVzip)"]
    assert set(first["figures"]["rank_correlation"]) == set(gate_evaluation.GUESSES)
    assert [row["layer"] for row in first["figures"]["layers"]] == list(range(N_LAYERS))

    (tmp_path / "data" / "train-001.safetensors").unlink()  # as if the run had been killed
    observed = []
    real = gate_data.observe
    monkeypatch.setattr(train_gates, "observe", lambda *args: observed.append(1) or real(*args))
    second = run_script(folder, tmp_path, capsys, "--output", str(paths[1]), "--check", "0")
    assert len(observed) == 1
    assert second.pop("presses") == [] != first.pop("presses")
    for result in (first, second):
        assert set(result.pop("seconds")) == {"documents", "training", "evaluation", "presses"}
    assert first == second and paths[0].read_bytes() == paths[1].read_bytes()

    third = run_script(folder, tmp_path, capsys, "--gates", str(paths[0]), "--check", "0")
    assert third["figures"] == first["figures"] and "losses" not in third


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ("--documents 0", "--documents must be at least 1"),
        ("--held-out -1", "--held-out must be at least 1"),
        ("--tokens 50", "--tokens must be at least 100"),
        ("--tokens 4000", "--tokens 4000 is too long"),
        ("--check 3", r"--check must be between 0 and --held-out \(2\)"),
        ("--rate nan", "--rate must be above 0"),
        ("--compression-ratio 1", r"--compression-ratio must be in \[0, 1\)"),
        ("--output gates.pt", "--output must end in .safetensors"),
        ("--gates nothing.safetensors", "--gates 'nothing.safetensors' is not a file"),
        ("--text nothing.txt", "--text 'nothing.txt' cannot be read"),
        ("--documents 9999", "9999 and 2 are wanted"),
        ("--model nowhere/at-all", "--model 'nowhere/at-all' cannot be loaded"),
    ],
)
def test_bad_options_give_one_line(folder, tmp_path, capsys, options, match):
    assert train_gates.main([*tiny_arguments(folder, tmp_path), *options.split()]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and error.startswith("train_gates: ")
    assert re.search(match, error)
    assert not (tmp_path / "data").exists()


def test_gates_of_another_model_end_the_script(folder, tiny_model, tmp_path, capsys):
    path, other = tmp_path / "other.safetensors", tiny_model("llama", num_hidden_layers=2)
    gate_training.save_gates(path, new_gates(other), other.config, {})
    assert train_gates.main([*tiny_arguments(folder, tmp_path), "--gates", str(path)]) == 2
    assert "2 layers (the model has 4)" in capsys.readouterr().err
