"""The package as users install it: what importing it does, what works with torch alone, what the wheel holds."""

import importlib
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import verkv

ROOT = Path(__file__).parents[1]
SOURCE = Path(verkv.__file__).parents[1]


def run(code, path=SOURCE, cwd=None):
    """Run Python code in a fresh interpreter that finds verkv in ``path`` first."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_public_name_resolves():
    assert "VerKVPress" in verkv.__all__ and len(set(verkv.__all__)) == len(verkv.__all__)
    assert set(verkv.__all__) <= set(dir(verkv))
    importlib.import_module("verkv.presses")
    for name in verkv.__all__:
        assert getattr(verkv, name) is not None


@pytest.mark.parametrize("name", ["estimators", "sketches", "presses"])
def test_every_public_name_of_a_subpackage_resolves(name):
    module = importlib.import_module(f"verkv.{name}")
    for public in module.__all__:
        assert getattr(module, public) is not None


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="'verkv' has no attribute 'Nothing'"):
        _ = verkv.Nothing
    assert not hasattr(verkv, "__wrapped__")


def test_version_is_that_of_the_project():
    assert f'version = "{verkv.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_import_loads_nothing_and_changes_nothing():
    run(
        """
        import sys
        before = set(sys.modules)
        import verkv
        dir(verkv)
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        assert not new & {"torch", "transformers", "kvpress", "matplotlib", "numpy"}, new
        assert [name for name in sys.modules if name.startswith("verkv.")] == []
        """
    )


def test_import_leaves_attention_functions_alone():
    run(
        """
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping), dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
        import verkv, verkv.cache, verkv.attention, verkv.context, verkv.stats
        verkv.make_cache, verkv.FetchStats, verkv.RopePairSketch
        after = dict(ALL_ATTENTION_FUNCTIONS._local_mapping), dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
        assert before == after
        import sys
        assert "kvpress" not in sys.modules and "matplotlib" not in sys.modules
        """
    )


WITH_TORCH_ALONE = """
    import sys
    for name in ("transformers", "kvpress", "numpy", "tqdm", "matplotlib", "datasets", "scipy"):
        sys.modules[name] = None
    import torch
    import verkv
    from verkv.estimators import binary_shrinkage, fetch_plan, inclusion_probabilities, poisson_sample
    from verkv.kvfetch import FetchConfig, decide

    r = inclusion_probabilities(torch.rand(100), 20.0, floor=0.01)
    sampled = poisson_sample(r, torch.Generator().manual_seed(0))
    keys, query = torch.randn(1, 1, 100, 16), torch.randn(1, 1, 2, 16)
    for sketch in (verkv.RopePairSketch(), verkv.ExactSketch()):
        logits = sketch.build(keys).logits(query)[0]
        decision = decide(logits, torch.full((1, 2), -torch.inf), r[None], (r < 1)[None], FetchConfig())
        assert (decision.planned_bound < 0.05).all()
    assert verkv.FetchStats("test").fetch_rate() == 0.0
    try:
        verkv.VerKVPress
    except ImportError as error:
        assert "verkv[kvpress]" in str(error)
    else:
        raise AssertionError("presses cannot work without kvpress")
"""


def test_mathematics_and_sketches_need_torch_alone():
    run(WITH_TORCH_ALONE)


def test_cache_needs_no_kvpress():
    run(
        """
        import sys
        sys.modules["kvpress"] = None
        import verkv
        from verkv.cache import make_cache
        from transformers import LlamaConfig
        assert len(make_cache(LlamaConfig(num_hidden_layers=3)).layers) == 3
        """
    )


@pytest.mark.slow
def test_wheel_runs_and_is_typed(tmp_path):
    pytest.importorskip("build", reason="the wheel is built with the dev extra's tools")
    pytest.importorskip("hatchling", reason="the wheel is built with the dev extra's tools")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("verkv-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert "verkv/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"verkv", f"verkv-{verkv.__version__}.dist-info"}
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "verkv").rglob("*.py")}
    assert sources <= set(names)

    check = """
        from pathlib import Path
        import verkv, verkv.estimators, verkv.sketches, verkv.cache
        for module in (verkv, verkv.estimators, verkv.sketches, verkv.cache):
            assert Path({!r}) in Path(module.__file__).parents, module.__file__
    """.format(str(tmp_path / "site"))
    run(check, path=tmp_path / "site", cwd=tmp_path)
    run(WITH_TORCH_ALONE, path=tmp_path / "site", cwd=tmp_path)
