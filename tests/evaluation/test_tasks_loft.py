"""LOFT's folder format, corpus-in-context prompts, and the offline data sets made from XQuAD."""

import ast
import importlib
import json
import os
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from verkv.demo_model import demo_model_path
from verkv.evaluation import tasks

offline_loft = importlib.import_module("verkv.evaluation.tasks.offline_loft")
LOFT_TASKS, build_examples = tasks.LOFT_TASKS, tasks.build_examples
NAMES = [task.removeprefix("loft_") for task in LOFT_TASKS]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A miniature of XQuAD: 8 articles of 2 paragraphs of 6 questions."""
    folder = tmp_path_factory.mktemp("data")
    articles = [{"title": f"Ship_{i}", "paragraphs": [paragraph(i, j) for j in range(2)]} for i in range(8)]
    (folder / "xquad.en.json").write_text(json.dumps({"data": articles}), encoding="utf-8")
    return folder


def paragraph(i, j):
    cargo = [f"bale {i}{j}{k} of wool" for k in range(6)]
    text = ". ".join(f"Hold {k} of deck {j} on ship {i} carried {what}" for k, what in enumerate(cargo)) + "."
    qas = [
        {"question": f"What did hold {k} of deck {j} on ship {i} carry?", "id": "", "answers": [{"text": what}]}
        for k, what in enumerate(cargo)
    ]
    return {"context": text, "qas": qas}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def loft(tmp_path):
    """A data set laid out as LOFT's downloads are, written by hand."""
    folder = tmp_path / "data" / "rag" / "quest" / "32k"
    passages = [
        ("d7", "Dune", "A desert."),
        ("d3", "", " A river. "),
        ("d9", "Peak", "A mountain."),
        ("d1", "Bay", "x"),
    ]
    rows = [{"pid": p, "title_text": t, "passage_text": x, "metadata": {}} for p, t, x in passages]
    write(folder / "corpus.jsonl", rows)

    def query(qid, text, answers, pids):
        return {"qid": qid, "query_text": text, "answers": answers, "metadata": {"qrels": [[pid, 1] for pid in pids]}}

    write(folder / "few_shot_queries.jsonl", [query("f1", "Which is high?", ["Peak"], ["d9"])])
    write(folder / "dev_queries.jsonl", [query("v1", "Which is wet?", ["river"], ["d3"])])
    write(folder / "test_queries.jsonl", [query("t1", "Which are low?", ["Dune", "Bay"], ["d7", "d1"])] * 2)
    return folder


def test_reads_lofts_format(loft):
    data = tasks.loft.read_loft(loft)
    assert [(p.pid, p.title, p.text) for p in data.corpus][:2] == [
        ("d7", "Dune", "A desert."),
        ("d3", "None", "A river."),
    ]
    assert [q.qid for q in data.few_shot + data.dev + data.test] == ["f1", "v1", "t1", "t1"]
    assert data.test[0].answers == ("Dune", "Bay") and data.test[0].passages == ("d7", "d1")
    assert data.source == "LOFT, quest/32k"


def test_prompt(loft, tokenizer):
    (row,) = build_examples("loft_quest", tokenizer, 1000, 1, data_dir=loft.parents[3])
    instruction, rest = row["context"].split("ID: 0 |")
    assert "Final Answer: ['answer1', 'answer2', ...]" in instruction
    corpus, example = ("ID: 0 |" + rest).split("\n\n====== Example 1 ======\n")
    assert corpus.split("\n") == [
        "ID: 0 | TITLE: Dune | CONTENT: A desert. | END ID: 0",
        "ID: 1 | TITLE: None | CONTENT: A river. | END ID: 1",
        "ID: 2 | TITLE: Peak | CONTENT: A mountain. | END ID: 2",
        "ID: 3 | TITLE: Bay | CONTENT: x | END ID: 3",
    ]
    asked, solution = example.split("query: Which is high?\n")
    assert "TITLE and ID of the documents" in asked
    assert solution == "TITLE: Peak | ID: 2\nFinal Answer: ['Peak']\n\n"
    assert row["question"].startswith("====== Now let's start! ======\nBased on the documents above")
    assert row["question"].endswith("query: Which are low?\n") and row["answer_prefix"] == ""
    assert row["answer"] == ["Dune", "Bay"] and row["max_new_tokens"] == 256


def test_the_whole_corpus_gives_one_context(loft, tokenizer):
    rows = build_examples("loft_quest", tokenizer, 1000, 2, data_dir=loft.parents[3])
    assert rows[0]["context"] == rows[1]["context"]


def test_a_part_of_the_corpus_has_what_is_needed(loft, tokenizer):
    with pytest.raises(ValueError, match=r"n_tokens must be at least (\d+)") as error:
        build_examples("loft_quest", tokenizer, 300, 1, data_dir=loft.parents[3])
    least = int(re.search(r"at least (\d+)", str(error.value))[1])
    (row,) = build_examples("loft_quest", tokenizer, least, 1, data_dir=loft.parents[3])
    assert re.findall(r"CONTENT: (.*?) \|", row["context"]) == ["A desert.", "A mountain.", "x"]
    assert "TITLE: Peak | ID: 1\n" in row["context"]  # ids count the passages that are there


@pytest.mark.parametrize("n_tokens, expected", [(5_000, "32k"), (32_000, "32k"), (32_001, "128k"), (2_000_000, "1m")])
def test_least_length_that_holds_the_prompt(loft, n_tokens, expected):
    for length in ("128k", "1m", "notes"):
        (loft.parent / length).mkdir()
    assert tasks.loft._length_folder(loft.parent, n_tokens).name == expected


# --- made from XQuAD --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_offline_data_is_in_lofts_format(name, data_dir, tmp_path):
    made = offline_loft.loft_from_xquad(name, data_dir / "xquad.en.json")
    offline_loft.write_loft(made, tmp_path / name / "64k")
    read = tasks.loft.read_loft(tmp_path / name / "64k")
    assert (read.corpus, read.few_shot, read.dev, read.test) == (made.corpus, made.few_shot, made.dev, made.test)
    assert len(made.test) >= 5 and len(made.dev) == 10


@pytest.mark.parametrize("name", NAMES)
def test_offline_answers_follow_from_the_passages(name, data_dir):
    data = offline_loft.loft_from_xquad(name, data_dir / "xquad.en.json")
    passages = {p.pid: p for p in data.corpus}
    queries = data.few_shot + data.dev + data.test
    assert len({q.text for q in queries}) == len(queries)
    for query in queries:
        texts = [passages[pid].text for pid in query.passages]
        facts = re.findall(r"hold (\d) of deck (\d) on ship (\d)", query.text)
        cargo = [f"bale {ship}{deck}{hold} of wool" for hold, deck, ship in facts]
        assert all(what in text for what, text in zip(cargo, texts, strict=False))
        if name in ("hotpotqa", "musique"):
            (number,) = re.findall(rf'The record number of "{cargo[0]}" is (\d+)\.', texts[1])
            rooms = re.findall(rf"The record with number {number} is kept in the room (\S+)\.", texts[-1])
            assert list(query.answers) == (rooms if name == "musique" else [number])
            others = [p.text for p in data.corpus if p.pid not in query.passages]
            assert not any(query.answers[0] in text or f'"{cargo[0]}"' in text for text in others)
        else:
            assert list(query.answers) == (
                [passages[pid].title for pid in query.passages] if name == "quest" else cargo
            )
            assert len(query.passages) == (1 if name == "nq" else len({ship for *_, ship in facts}))


@pytest.mark.parametrize("task", LOFT_TASKS)
def test_examples(task, tokenizer, data_dir, tmp_path):
    three = build_examples(task, tokenizer, 2500, 3, data_dir=data_dir)
    assert tuple(three.column_names) == tasks.COLUMNS
    assert build_examples(task, tokenizer, 2500, 1, data_dir=data_dir).to_list() == three.to_list()[:1]
    prompt = tasks.Prompt.of(tokenizer)
    for row in three:
        length = prompt.count(tasks.Example(**row))
        assert 2500 >= length >= 2000
        assert all(answer in row["context"] for answer in row["answer"])
        # The solved examples' own answers are what the score asks for.
        solved = row["context"].rsplit("Final Answer: ", 1)[1].strip()
        assert tasks.score(task, f"Final Answer: {solved}", ast.literal_eval(solved)) == 1.0
    three.to_parquet(tmp_path / "x.parquet")
    assert type(three).from_parquet(str(tmp_path / "x.parquet"), cache_dir=str(tmp_path)).to_list() == three.to_list()


def test_the_seed_chooses_what_is_left_out(tokenizer, data_dir):
    first, again, other = (
        build_examples("loft_hotpotqa", tokenizer, 1600, 1, seed=seed, data_dir=data_dir)[0] for seed in (0, 0, 1)
    )
    assert first == again
    assert first["question"] == other["question"] and first["context"] != other["context"]


def test_command_writes_folders_that_the_tasks_find(tokenizer, data_dir, tmp_path, capsys):
    assert offline_loft.main(["--out", str(tmp_path), "--data-dir", str(data_dir)]) == 0
    assert capsys.readouterr().out.count("test queries") == 5
    for task in LOFT_TASKS:
        assert tasks.source_of(task, 3000, tmp_path).startswith("LOFT, ")
        rows = [build_examples(task, tokenizer, 3000, 2, data_dir=folder).to_list() for folder in (tmp_path, data_dir)]
        assert rows[0] == rows[1]


def test_with_xquad(tokenizer):
    folder = os.environ.get("VERKV_DATA")
    if not folder or not Path(folder, "xquad.en.json").is_file():
        pytest.skip("VERKV_DATA does not name a folder with xquad.en.json")
    prompt = tasks.Prompt.of(tokenizer)
    for task in LOFT_TASKS:
        lengths = [prompt.count(tasks.Example(**row)) for row in build_examples(task, tokenizer, 3000, 8)]
        assert max(lengths) <= 3000 and min(lengths) > 2400
        assert len(tasks.loft.find_loft(task.removeprefix("loft_"), 3000, None).test) == 100


# --- bad input --------------------------------------------------------------------------------------------------------


def test_missing_data(tokenizer, tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match=r"has neither LOFT's rag/nq/ nor xquad\.en\.json"):
        build_examples("loft_nq", tokenizer, 3000, 1, data_dir=tmp_path)
    (tmp_path / "rag" / "nq").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds no folder of a length, such as 32k"):
        build_examples("loft_nq", tokenizer, 3000, 1, data_dir=tmp_path)
    (tmp_path / "rag" / "nq" / "32k").mkdir()
    with pytest.raises(ValueError, match=r"corpus\.jsonl is missing in the LOFT folder"):
        build_examples("loft_nq", tokenizer, 3000, 1, data_dir=tmp_path)
    monkeypatch.delenv("VERKV_DATA", raising=False)
    with pytest.raises(ValueError, match="task 'loft_nq' needs a data folder: --data-dir or VERKV_DATA"):
        build_examples("loft_nq", tokenizer, 3000, 1)
    assert offline_loft.main(["--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("offline_loft: xquad.en.json not found") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_too_few_queries_or_questions(loft, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="n_examples must be at most 2 for task 'loft_quest'"):
        build_examples("loft_quest", tokenizer, 1000, 3, data_dir=loft.parents[3])
    articles = [{"title": "Ship", "paragraphs": [paragraph(0, 0)]}]
    (tmp_path / "xquad.en.json").write_text(json.dumps({"data": articles}))
    with pytest.raises(ValueError, match=r"xquad\.en\.json has too few questions for an offline qampari"):
        offline_loft.loft_from_xquad("qampari", tmp_path / "xquad.en.json")


@pytest.mark.parametrize(
    "file, line, message",
    [
        ("corpus.jsonl", "{", "line 1: not JSON"),
        ("corpus.jsonl", '{"pid": "d7"}', "line 1: no passage_text"),
        ("test_queries.jsonl", '{"qid": "t1", "query_text": "?"}', "line 1: no answers, metadata"),
        (
            "dev_queries.jsonl",
            '{"qid": "v1", "query_text": "?", "answers": [], "metadata": {"qrels": [["d8", 1]]}}',
            r"query v1 names passages that corpus.jsonl lacks: \['d8'\]",
        ),
    ],
)
def test_broken_files(loft, file, line, message):
    (loft / file).write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        tasks.loft.read_loft(loft)
