"""Fast KVzip: gates from files, modules and KVPress, their scores, and what is refused."""

import zipfile

import kvpress
import numpy as np
import pytest
import torch
from kvpress.presses.fastkvzip_press import FastKVzipGate
from press_helpers import full_layers, left_padded, positions, prefill, random_ids
from torch import nn

from verkv import FastKVzipPress, PoissonCompPress
from verkv.presses.fastkvzip_press import download_gates, load_gates

N_LAYERS, HIDDEN, N_KV_HEADS, GROUP = 4, 64, 2, 2  # of the tiny Llama


def make_gates(n_layers=N_LAYERS, n_kv_heads=N_KV_HEADS, dtype=torch.float32, sink=16):
    gates = []
    for i in range(n_layers):
        gate = FastKVzipGate(i, HIDDEN, n_kv_heads, GROUP, dtype, sink=sink)
        nn.init.normal_(gate.k_base)
        nn.init.normal_(gate.b)
        gates.append(gate.eval())
    return gates


@pytest.fixture
def gates():
    return make_gates()


@pytest.fixture
def gate_file(gates, tmp_path):
    """A file in the authors' format."""
    path = tmp_path / "q2_dim16_sink16.pt"
    torch.save({"module": [gate.state_dict() for gate in gates]}, path)
    return path


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")


@torch.no_grad()
def hidden_states(model, ids, **kwargs):
    """Inputs of every layer's attention, (B, T, hidden)."""
    taken, handles = {}, []
    for i, layer in enumerate(model.model.layers):
        handles.append(layer.input_layernorm.register_forward_hook(lambda m, a, out, i=i: taken.__setitem__(i, out)))
    model.model(input_ids=ids, **kwargs)
    for handle in handles:
        handle.remove()
    return taken


def scores_of(press, model, ids, **kwargs):
    """The scores that a press hands to :meth:`seal` in a prefill."""
    taken = {}

    class Recording(PoissonCompPress):
        def _plans(self, scores, *args):
            taken.update(scores)
            return super()._plans(scores, *args)

    cache = prefill(model, ids, Recording(press, compression_ratio=0.5, n_sink=2, n_local=2), **kwargs)
    assert full_layers(cache) == list(range(N_LAYERS))
    return taken


def kvpress_with(gates):
    press = kvpress.FastKVzipPress(compression_ratio=0.5)
    press.gates = gates
    return press


@pytest.mark.parametrize("origin", ["file", "string", "modules", "kvpress"])
def test_scores_equal_the_gates_outputs(model, gates, gate_file, origin):
    press = {
        "file": FastKVzipPress(gates=gate_file),
        "string": FastKVzipPress(gates=str(gate_file)),
        "modules": FastKVzipPress(gates=gates),
        "kvpress": kvpress_with(gates),
    }[origin]
    ids = random_ids(1, 60)
    scores, hidden = scores_of(press, model, ids), hidden_states(model, ids)
    for i, gate in enumerate(gates):
        with torch.no_grad():
            expected = gate(hidden[i])
        assert expected.std() > 1e-3
        torch.testing.assert_close(scores[i], expected, atol=1e-6, rtol=0)


def test_scores_equal_kvpress_but_for_its_protected_ends(model, gates):
    ids = random_ids(1, 60)
    theirs = kvpress_with(gates)
    with torch.no_grad(), theirs(model):
        model.model(input_ids=ids)
    scores = torch.stack(list(scores_of(FastKVzipPress(gates=gates), model, ids).values()))
    torch.testing.assert_close(scores[..., 4:-1], theirs.score_val[..., 4:-1], atol=1e-6, rtol=0)
    assert (theirs.score_val[..., :4] == 1).all() and not (scores[..., :4] == 1).any()
    for layer in model.model.layers:  # KVPress leaves its masked indices on the modules
        layer.self_attn.masked_key_indices = None


def test_batch_scores_equal_those_of_each_row_alone(model, gates):
    rows = [random_ids(1, 40), random_ids(1, 60, seed=2)]
    ids, mask = left_padded(rows)
    scores = scores_of(FastKVzipPress(gates=gates), model, ids, attention_mask=mask, position_ids=positions(mask))
    for i, row in enumerate(rows):
        alone = scores_of(FastKVzipPress(gates=gates), model, row)
        for idx in range(N_LAYERS):
            torch.testing.assert_close(scores[idx][i : i + 1, :, -row.shape[1] :], alone[idx], atol=1e-5, rtol=0)


def test_gates_may_have_another_dtype_than_the_model(model):
    gates = make_gates(dtype=torch.bfloat16)
    scores = scores_of(FastKVzipPress(gates=gates), model, random_ids(1, 60))
    assert all(score.dtype == torch.float32 and score.isfinite().all() for score in scores.values())


@pytest.mark.parametrize("sink", [0, 16])
def test_sizes_are_read_from_the_file(tmp_path, sink):
    gates = make_gates(sink=sink)
    torch.save({"module": [gate.state_dict() for gate in gates]}, tmp_path / "gates.pt")
    hidden = torch.randn(1, 9, HIDDEN)
    for gate, loaded in zip(gates, load_gates(tmp_path / "gates.pt"), strict=True):
        with torch.no_grad():
            assert torch.equal(loaded(hidden), gate(hidden))


@pytest.mark.parametrize("module", ["numpy._core", "numpy.core"], ids=["numpy2", "numpy1"])
def test_files_with_numpy_numbers_load(gates, tmp_path, module):
    """The authors' files hold numpy numbers beside the weights, and were written by numpy 1."""
    path, other = tmp_path / "gates.pt", tmp_path / "other.pt"
    torch.save({"module": [gate.state_dict() for gate in gates], "loss": np.array(0.5)}, path)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(other, "w") as copy:
        for name in archive.namelist():
            content = archive.read(name)
            if name.endswith("data.pkl"):
                assert b"numpy._core.multiarray" in content
                content = content.replace(b"numpy._core.multiarray", module.encode() + b".multiarray")
            copy.writestr(name, content)
    assert len(load_gates(other)) == N_LAYERS


@pytest.mark.parametrize(("n_tokens", "n_local"), [(60, 1), (200, 4), (31_999, 639), (32_000, 4096)])
def test_local_window_is_fast_kvzips_own_rule(n_tokens, n_local):
    assert FastKVzipPress()._n_protected_ends(n_tokens, 0) == (4, n_local)
    assert FastKVzipPress(n_local=7)._n_protected_ends(n_tokens, 0) == (4, 7)


def test_eviction_keeps_ends_and_the_highest_scores(model, gates):
    ids = 3 + torch.randperm(250)[None, :100]  # a token that comes twice has the same score twice in the first layer
    press = FastKVzipPress(0.6, gates=gates, budget_scope="head")
    scores = scores_of(press, model, ids)
    plain, cache = prefill(model, ids), prefill(model, ids, press)
    for i, layer in enumerate(cache.layers):
        ranked = scores[i][0].clone()
        ranked[:, :4] = ranked[:, -2:] = 2.0
        rows, offsets = layer.context.rows.keys, layer.context.rows.offsets.tolist()
        for head in range(N_KV_HEADS):
            n_kept = offsets[head + 1] - offsets[head]
            best = ranked[head].topk(n_kept).indices.sort().values
            assert torch.equal(rows[offsets[head] : offsets[head + 1]], plain.layers[i].keys[0, head, best])
    memory = press.memory_report()
    assert memory.host == {} and sum(memory.device.values()) <= 0.4 * memory.full_bytes


# --- what is refused --------------------------------------------------------------------------------------------------


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_code_in_a_gate_file_is_not_run(model, gates, tmp_path):
    path, trace = tmp_path / "gates.pt", tmp_path / "executed"
    torch.save({"module": [gate.state_dict() for gate in gates], "extra": Malicious(trace)}, path)
    with pytest.raises(ValueError, match="does not hold Fast KVzip gates"), FastKVzipPress(0.5, gates=path)(model):
        pass
    assert not trace.exists()
    torch.load(path, weights_only=False)  # the file is what it is meant to be
    assert trace.exists()


def refused(model, gates, match):
    with pytest.raises(ValueError, match=match), FastKVzipPress(0.5, gates=gates)(model):
        pass
    with pytest.raises(ValueError, match=match), PoissonCompPress(FastKVzipPress(0.5, gates=gates))(model):
        pass


def test_missing_file(model, tmp_path):
    refused(model, tmp_path / "nothing.pt", match="nothing.pt.*is not a file")


@pytest.mark.parametrize("content", [{"weights": []}, [1, 2], {"module": [{"q_proj.weight": torch.zeros(2, 2)}]}])
def test_file_of_another_kind(model, tmp_path, content):
    torch.save(content, tmp_path / "gates.pt")
    refused(model, tmp_path / "gates.pt", match="does not hold Fast KVzip gates")


def test_file_that_is_no_torch_file(model, tmp_path):
    (tmp_path / "gates.pt").write_text("not a checkpoint")
    refused(model, tmp_path / "gates.pt", match="does not hold Fast KVzip gates")


def test_gates_for_another_number_of_layers(model):
    refused(model, make_gates(n_layers=3), match="3 layers, the model has 4; pass .* own gates")


def test_gates_for_another_number_of_heads(model):
    gates = make_gates(n_kv_heads=4)
    with pytest.raises(ValueError, match=r"4 KV heads, layer 0 has 2; pass .* own gates"):
        prefill(model, random_ids(1, 60), FastKVzipPress(0.5, gates=gates))


def test_hub_without_gates_names_the_remedy(model, monkeypatch):
    import huggingface_hub

    asked = {}

    def offline(**kwargs):
        asked.update(kwargs)
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    model.config.name_or_path = "somebody/My-Model/"
    refused(model, None, match=r"no Fast KVzip gates for.*FastKVzipPress\(gates=FILE\).*KVzipPress\(\)")
    assert asked["filename"] == "my-model/q2_dim16_sink16.pt"
    assert asked["repo_id"] == "Jang-Hyun/Fast-KVzip"


def test_hub_file_is_loaded(model, gate_file, monkeypatch, gates):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda **kwargs: str(gate_file))
    loaded = download_gates(model.config)
    assert torch.equal(loaded[1].q_proj.weight, gates[1].q_proj.weight)


@pytest.mark.parametrize("options", [{"n_local": -1}, {"n_sink": -2}, {"budget_scope": "all"}])
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        FastKVzipPress(**options)
