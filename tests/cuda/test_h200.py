"""The script that measures on a GPU, as far as a CPU can take it: its dry run, and its checks over the emulator."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from agreement import needs_compiler
from emulator import emulator

from verkv.cuda import operators

SCRIPT = Path(__file__).parents[2] / "experiments" / "h200.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("h200", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_dry_run_writes_a_table_and_json(script, tmp_path, capsys):
    report = script.main(["--dry-run", "--output", str(tmp_path / "out.json"), "--table", str(tmp_path / "out.md")])
    assert json.loads((tmp_path / "out.json").read_text()) == report
    lines = (tmp_path / "out.md").read_text().splitlines()
    assert len(lines) == 2 + len(report["settings"]) and len({line.count("|") for line in lines}) == 1
    assert lines[0] in capsys.readouterr().out
    assert {(s["n_tokens"], s["batch"], s["epsilon"]) for s in report["settings"]} == {
        (n, b, e) for n in (256, 700) for b in (1, 2) for e in (0.5, 0.05)
    }
    assert all(s["fetched_rows"] > 0 and s["dense_ms"] > 0 for s in report["settings"])


def test_time_is_limited(script):
    report = script.main(["--dry-run", "--seconds", "0"])
    assert not report["settings"] and len(report["left_out"]) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a CUDA device")
def test_without_a_device_it_says_so(script, capsys):
    with pytest.raises(SystemExit):
        script.main([])
    assert "--dry-run needs none" in capsys.readouterr().err


@needs_compiler
def test_its_checks_pass_over_the_emulator(script, monkeypatch):
    """The kernels' side of the script: buffers, launches and the comparison with float64."""

    def run(names, sizes, arrays, scalars, dtype):
        params = operators.kernel_params(sizes, arrays, scalars)
        for name in names:
            emulator(sizes.head_dim, sizes.tile, dtype == torch.float16).launch(name, sizes, params)

    monkeypatch.setattr(operators, "run_kernels", run)
    monkeypatch.setattr(operators, "n_multiprocessors", lambda device: 2)
    cases = ((900, 0.05), (4500, 0.01))
    found = script.check_kernels(script.TINY[0], torch.bfloat16, torch.device("cpu"), cases)
    settings = [(check["n_tokens"], check["upper_share"]) for check in found]
    assert settings == [(900, None), (900, 0.7), (4500, None), (4500, 0.7)]
    for check in found:
        assert check["k_differs"] == check["union_differs"] == check["shrinkage_differs"] == 0
        assert check["output_error"] < 1e-5


@needs_compiler
def test_its_contexts_agree_over_the_emulator(script, emulated_device):
    found = script.check_contexts(script.TINY[0], torch.bfloat16, torch.device("cpu"), 900)
    settings = [(check["n_queries"], check["upper_share"]) for check in found]
    assert settings == [(1, None), (1, 0.7), (4, None), (4, 0.7)] and emulated_device.count("vk_settle") == 4
    for check in found:
        assert check["by_kernels"] and check["output_error"] < 1e-5 and check["bound_error"] < 1e-5
        assert check["shortlisted"][0] == check["shortlisted"][1] > 0
        for name in ("promoted", "fetched"):
            assert check[name][0] > 0 and abs(check[name][0] - check[name][1]) <= 2
