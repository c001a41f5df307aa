"""KVPress' own press tests, run with VerKV's presses by KVPress' own test file."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import verkv

pytest.importorskip("kvpress")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
KVPRESS_TESTS = ROOT / ".cache" / "kvpress-0.5.5"
N_PRESSES = 20  # (7 PoissonComp + 2 VerKV) x 2 protections, KVzip and Fast KVzip alone
N_WRAPPERS = 10  # of KVPress' test_presses_run, None among them
N_OTHERS = 5  # tests of the file that do not use the list of presses


@pytest.fixture(scope="module")
def kvpress_run(tmp_path_factory, tiny_model):
    """Output of KVPress' tests/presses/test_presses.py."""
    if not (KVPRESS_TESTS / "tests" / "presses" / "test_presses.py").is_file():
        pytest.skip("KVPress' tests are not there; run scripts/fetch_kvpress_tests.py")
    from transformers import AutoTokenizer

    from verkv.demo_model import demo_model_path

    folder = tmp_path_factory.mktemp("tiny_llama")
    tiny_model("llama", vocab_size=49152, num_hidden_layers=2).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)

    paths = [KVPRESS_TESTS, Path(__file__).parents[1] / "helpers", Path(verkv.__file__).parents[1]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "VERKV_TINY_LLAMA": str(folder)}
    # Its own root: our pyproject.toml asks for importlib mode, but these tests import each other as a package.
    options = ["-q", "-rs", "-p", "no:cacheprovider", "-p", "kvpress_plugin", "--rootdir", str(KVPRESS_TESTS)]
    options += ["-c", os.devnull, "--import-mode=prepend"]
    command = [sys.executable, "-B", "-m", "pytest", *options, "tests/presses/test_presses.py"]
    done = subprocess.run(command, cwd=KVPRESS_TESTS, env=environment, capture_output=True, text=True, timeout=280)
    return done.stdout + done.stderr


def test_all_pass(kvpress_run):
    summary = kvpress_run.strip().splitlines()[-1]
    assert re.search(rf"\b{N_PRESSES * N_WRAPPERS + N_OTHERS} passed\b", summary), kvpress_run
    assert not re.search(r"failed|error|skipped", summary), kvpress_run


def test_every_press_was_used_on_sealed_layers(kvpress_run):
    contexts = re.findall(r"PRESS (\S+) sealed=(\d+) exact=(\d+)", kvpress_run)
    assert len(contexts) == N_PRESSES
    for name, sealed, exact in contexts:
        # Two ratios without a wrapper. ComposedPress calls no context of ours, the other wrappers want a ScorerPress.
        protects_all = not name.endswith("Short") and not name.startswith(("KVzip", "FastKVzip"))
        assert (int(sealed), int(exact)) == ((0, 2) if protects_all else (2, 0)), name


def test_composed_press_warns(kvpress_run):
    assert "compresses only as the outermost press" in kvpress_run
