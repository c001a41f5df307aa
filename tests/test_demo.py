"""``verkv demo`` and the command line."""

import json
from importlib.metadata import version

import pytest

from verkv.cli import main
from verkv.demo import KEYS, DemoSettings, build_task, format_table, prose_paragraphs, run_demo


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon", "0"], "epsilon"),
        (["--delta", "1"], "delta"),
        (["--alpha", "2"], "alpha"),
        (["--compression-ratio", "16"], "0.9375"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--shortlist", "-1"], "shortlist"),
        (["--model", "no/such/folder"], "--model"),
        (["--device", "abacus"], "--device"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_bad_options_give_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("VERKV_DEMO_MODEL", str(tmp_path))  # nothing is loaded before the options are checked
    assert main(["demo", "--output-dir", str(tmp_path / "out"), *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("verkv demo: ") and message in error and "Traceback" not in error


def test_output_folder_that_cannot_be_made(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--output-dir", str(tmp_path / "file" / "x")]) == 1
    assert "--output-dir" in capsys.readouterr().err


def test_prose_is_prose():
    paragraphs = prose_paragraphs()
    assert sum(map(len, paragraphs)) > 200_000
    assert not any("::=" in text or "\n" in text for text in paragraphs)


@pytest.mark.real_model
class TestWithTheModel:
    @pytest.mark.parametrize("n_tokens", [300, 1000])
    def test_task(self, demo_model, n_tokens):
        tokenizer = demo_model[1]
        task = build_task(tokenizer, n_tokens, seed=3)
        assert abs(len(tokenizer.encode(task.context)) - n_tokens) < 40
        assert task.context.count(task.answer) == 1 and all(key in task.context for key in KEYS)
        assert KEYS[0] in task.question and task.answer not in task.question
        assert build_task(tokenizer, n_tokens, seed=3) == task != build_task(tokenizer, n_tokens, seed=4)

    def test_task_of_impossible_length(self, demo_model):
        with pytest.raises(ValueError, match="--tokens"):
            build_task(demo_model[1], 20, seed=0)

    @pytest.mark.slow
    def test_whole_demo(self, demo_model, tmp_path, capsys):
        """Short and at 4x; what it prints is what it writes."""
        settings = DemoSettings(tokens=700, compression_ratio=0.75, max_new_tokens=4, output_dir=tmp_path)
        results = run_demo(settings)
        assert results[0].name == "dense" and len(results) == 6
        assert format_table(results, settings) in capsys.readouterr().out
        (line,) = (tmp_path / "demo.jsonl").read_text().splitlines()
        record = json.loads(line)
        assert record["settings"]["seed"] == 0 and record["versions"]["torch"] == version("torch")
        verified = record["results"][4]
        assert verified["name"] == "VerKV"
        assert 0 < verified["kv_read_per_token"] < 1 and verified["resident"] < 0.26
        assert verified["stats"]["decode_decisions"] == 3 * 270
        assert (tmp_path / "demo.png").stat().st_size > 10_000
