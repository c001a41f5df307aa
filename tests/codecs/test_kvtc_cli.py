"""`verkv kvtc` from a text to a stored context."""

import json
import random

import pytest

from verkv.cli import main
from verkv.codecs import Artefact, load_context

pytestmark = pytest.mark.filterwarnings("ignore:residuals are larger")


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    """A model with a tokenizer of one token a word, and two texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("kvtc_cli")
    words = {f"w{i}": i for i in range(256)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path / "model")
    tiny_model("llama").save_pretrained(path / "model")
    generator = random.Random(0)
    for name, n_tokens in (("long", 900), ("short", 200)):
        (path / f"{name}.txt").write_text(" ".join(f"w{generator.randrange(3, 256)}" for _ in range(n_tokens)))
    return path


def test_calibrate_compress_inspect_verify(folder, tiny_model, capsys):
    model, calibration, context = folder / "model", folder / "a.safetensors", folder / "c.kvtc"
    text = ["--text", str(folder / "long.txt")]
    arguments = ["kvtc", "calibrate", str(model), *text, "--out", str(calibration), "--length", "300"]
    assert main([*arguments, "--min-ratio", "2", "--tokens", "800", "--device", "cpu"]) == 0
    assert Artefact(calibration).metadata["n_tokens"] == 800 - 3 * 4
    text = ["--text", str(folder / "short.txt")]
    arguments = ["kvtc", "compress", str(model), "--calibration", str(calibration), *text, "--out", str(context)]
    assert main([*arguments, "--ratio", "4", "--v-ratio", "2", "--window", "20", "--device", "cpu"]) == 0
    for file in (calibration, context):
        capsys.readouterr()
        assert main(["kvtc", "inspect", str(file)]) == 0
        assert ("200 tokens" if file == context else "788 tokens") in capsys.readouterr().out
        assert main(["kvtc", "verify", str(file)]) == 0
    cache = load_context(context, tiny_model("llama"), calibration)
    assert cache.get_seq_length() == 200
    data = bytearray(context.read_bytes())
    data[-70] ^= 1
    context.write_bytes(data)
    assert main(["kvtc", "verify", str(context)]) == 1
    assert "verkv kvtc verify: " in capsys.readouterr().err


def test_errors_are_one_line(folder, capsys):
    for arguments in (["inspect", str(folder / "missing")], ["verify", str(folder / "long.txt")]):
        assert main(["kvtc", *arguments]) == 1
        assert capsys.readouterr().err.count("\n") == 1


def test_inspect_shows_the_press_of_a_sealed_context(folder, tiny_model, prefill, capsys):
    from kvpress import KnormPress

    from verkv import VerKVPress, make_cache
    from verkv.codecs import save_context

    model = tiny_model("llama")
    ids, _ = prefill(model, 100)
    press, cache = VerKVPress(KnormPress(), compression_ratio=0.6, n_sink=6, n_local=6), make_cache(model.config)
    import torch

    with torch.no_grad(), press(model):
        model(input_ids=ids, past_key_values=cache)
    save_context(folder / "s.kvtc", cache, model, press=press)
    assert main(["kvtc", "inspect", str(folder / "s.kvtc")]) == 0
    out = capsys.readouterr().out
    assert "sealed by VerKVPress" in out
    line = next(line for line in out.splitlines() if line.startswith("press: "))
    assert json.loads(line.removeprefix("press: "))["epsilon"] == 0.05
