"""``verkv bench`` with tiny sizes: that each benchmark runs, what it reports, what it refuses. No time is judged."""

import copy
import json

import pytest
import torch

from verkv.bench import decide
from verkv.bench.run import NAMES, run_bench
from verkv.bench.settings import BenchSettings, BenchSkipped
from verkv.cli import main
from verkv.estimators.compiled_plan import compiles

N_TOKENS = 300
TINY = {"quick": True, "rounds": 2, "tokens": N_TOKENS, "compression_ratio": 0.5, "device": "cpu"}


class Tokenizer:
    """Bytes as tokens; enough for KVzip's requests."""

    chat_template = None
    bos_token = ""

    def encode(self, text, return_tensors=None, add_special_tokens=False):
        return torch.tensor([[3 + ord(letter) % 200 for letter in text]])


@pytest.fixture(scope="module")
def prefix(tiny_model):
    """A tiny random model with a prefilled context."""
    pytest.importorskip("kvpress")
    from verkv import KVzipPress, make_cache, record_queries
    from verkv.bench.prefix import Prefix

    model = tiny_model("llama")
    ids = torch.randint(3, 256, (1, N_TOKENS), generator=torch.Generator().manual_seed(0))
    cache = make_cache(model.config)
    with torch.inference_mode():
        with record_queries(model) as queries:
            model.model(input_ids=ids, past_key_values=cache)
        source = KVzipPress(tokenizer=Tokenizer()).source()
        source.prepare(model)
        scores = source.after_prefill(model, cache, ids, None)
    return Prefix(model, Tokenizer(), cache, ids, scores, dict(queries), 0)


def test_decide(monkeypatch):
    monkeypatch.setattr(decide, "QUICK_SHAPES", [(1, 2, 300), (2, 1, 700)])
    comparisons = decide.run(BenchSettings(**TINY))
    assert [c.facts["tokens"] for c in comparisons] == [300, 700]
    for comparison in comparisons:
        cases = {"one torch.sort", "decide, linear", "decide, reference (sorts)"}
        assert set(comparison.seconds) == cases | ({"decide, compiled"} if compiles() else set())
        assert all(len(seconds) == 2 for seconds in comparison.seconds.values())
        assert 0 <= comparison.facts["most tokens promoted beyond the reference"] <= 2


def test_rows_of_decide_are_worth_deciding():
    logits, r, residual = decide.make_rows(2, 3, 1000, seed=0, device=torch.device("cpu"))
    assert logits.shape == (2, 3, 1000) and r.shape == residual.shape == (2, 1, 1000)
    assert torch.equal(residual, r < 1) and 0.5 < float(residual.float().mean()) < 1.0


def test_attention(prefix):
    from verkv.bench import attention

    before = copy.deepcopy(prefix.cache.layers[0].keys)
    (comparison,) = attention.run(BenchSettings(**TINY), prefix)
    assert set(comparison.seconds) == {"dense, resident", "dense, offloaded", "VerKV, paper", "VerKV, default"}
    assert comparison.facts["head dim"] == 16
    assert comparison.facts["notes"] == ["transformers' offloaded cache needs CUDA"]
    assert torch.equal(prefix.cache.layers[0].keys, before)  # the prefix can be used again


@pytest.mark.parametrize("epsilon", [1e-6, 1e6])
def test_decode_and_its_traffic(prefix, epsilon):
    """With a tiny tolerance all that is not resident must move; with a huge one nothing but keys for the shortlist."""
    from verkv.bench import decode

    (comparison,) = decode.run(BenchSettings(**TINY, epsilon=epsilon), prefix)
    cases = {"VerKV, paper", "VerKV, default"}
    cases |= {name + decode.WITHOUT_LOOPS for name in cases} if compiles() else set()
    assert set(comparison.seconds) == {"dense", *cases}
    for name in cases:
        facts = comparison.facts[name]
        assert facts["decode steps"] == 4  # two to warm up, two rounds
        assert facts["bytes of the full cache"] == 4 * 2 * N_TOKENS * 2 * 16 * 4
        assert facts["bytes read"] >= facts["bytes that must move"]
        assert 0.0 < facts["resident share"] <= 0.6
        if epsilon < 1:
            assert 0.4 < facts["bytes that must move"] / facts["bytes of the full cache"] < 0.8
        else:
            assert facts["bytes that must move"] == 0.0 < facts["bytes read"]


def test_replay(prefix, monkeypatch):
    import kvpress.presses.kvzip_press as theirs

    from verkv.bench import replay

    class AutoTokenizer:
        from_pretrained = staticmethod(lambda name: Tokenizer())

    monkeypatch.setattr(theirs, "AutoTokenizer", AutoTokenizer)
    (comparison,) = replay.run(BenchSettings(**TINY), prefix)
    assert set(comparison.seconds) == {replay.OURS, replay.THEIRS, replay.PREFILL}
    assert comparison.baseline == replay.THEIRS


def test_kernels_say_what_is_missing():
    from verkv.bench import kernels

    with pytest.raises(BenchSkipped, match="CUDA"):
        kernels.run(BenchSettings(**TINY))


class TestCommand:
    def test_json_and_table(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(decide, "QUICK_SHAPES", [(1, 2, 300)])
        file = tmp_path / "bench.json"
        threads = torch.get_num_threads()
        arguments = ["--quick", "--rounds", "1", "--device", "cpu", "--only", "decide", "--only", "kernels"]
        assert main(["bench", *arguments, "--json", str(file)]) == 0
        assert torch.get_num_threads() == threads
        printed = capsys.readouterr().out
        assert "decide, linear" in printed and "kernels: skipped: needs a CUDA device" in printed
        result = json.loads(file.read_text())
        assert [record["benchmark"] for record in result["comparisons"]] == ["decide"]
        assert result["skipped"] == {"kernels": "needs a CUDA device"}
        assert result["settings"]["rounds"] == 1 and result["versions"]["torch"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--only", "speed"], "--only"),
            (["--threads", "0"], "--threads"),
            (["--rounds", "0"], "--rounds"),
            (["--tokens", "-5"], "--tokens"),
            (["--seed", "-1"], "--seed"),
            (["--device", "abacus"], "--device"),
            (["--epsilon", "0"], "--epsilon"),
            (["--compression-ratio", "16"], "0.9375"),
            (["--json", "/no/such/folder/file"], "--json"),
            (["--only", "decode", "--model", "no/such/folder"], "--model"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else value,
    )
    def test_bad_options_give_one_line(self, arguments, message, capsys):
        if "--model" in arguments:
            pytest.importorskip("kvpress")
        assert main(["bench", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("verkv bench: ") and error.count("\n") == 1 and message in error

    def test_missing_model_skips_what_needs_it(self, capsys, monkeypatch):
        from verkv.bench import run

        def fail(settings):
            raise BenchSkipped("no model here")

        monkeypatch.setattr(run, "_prefix", fail)
        monkeypatch.setattr(decide, "QUICK_SHAPES", [(1, 1, 100)])
        result = run_bench(BenchSettings(**TINY))
        assert set(result["skipped"]) == set(NAMES) - {"decide"}
        assert "decode: skipped: no model here" in capsys.readouterr().out
