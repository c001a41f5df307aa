"""RULER's thirteen tasks: definitions, lengths, repeatability, errors."""

import json
import os
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from datasets import load_dataset
from transformers import AutoTokenizer

from verkv.demo_model import demo_model_path
from verkv.evaluation import tasks

RULER_TASKS, NOISE, build_examples = tasks.RULER_TASKS, tasks.words.NOISE, tasks.build_examples

NEEDLES = [task for task in RULER_TASKS if task.startswith("niah_")]
LENGTHS = (1500, 5000)
SIZED = [task for task in RULER_TASKS if not task.startswith("qa_")]  # documents are large units


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="module")
def coarse_tokenizer():
    """A second tokenizer, trained here: bytes and 300 merges, and a template without a system prompt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator([NOISE] * 3, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.chat_template = (
        "{% for message in messages %}<u>{{ message.content }}</u>{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    return tokenizer


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A miniature of XQuAD: 4 articles of 3 paragraphs of 4 questions."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "xquad.en.json").write_text(json.dumps({"data": [article(i) for i in range(4)]}), encoding="utf-8")
    return folder


def article(i):
    paragraphs = []
    for j in range(3):
        facts = [f"Lot {i}{j}{k} went to buyer number {i}{j}{k}777" for k in range(4)]
        qas = [
            {
                "question": f"Who bought lot {i}{j}{k}?",
                "id": f"{i}{j}{k}",
                "answers": [{"text": f"number {i}{j}{k}777"}],
            }
            for k in range(4)
        ]
        paragraphs.append({"context": ". ".join(facts) + ". No other lots were sold that day.", "qas": qas})
    return {"title": f"Auction_{i}", "paragraphs": paragraphs}


def n_tokens_of(row, tokenizer):
    """Tokens of the prompt as KVPress' pipeline forms it, and room for the answer."""
    mark = "@" * 60
    message = [{"role": "user", "content": row["context"] + mark}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    context, suffix = text.split(mark)
    question = row["question"] + suffix + row["answer_prefix"]
    pieces = [tokenizer.encode(piece, add_special_tokens=False) for piece in (context, question)]
    return sum(map(len, pieces)) + row["max_new_tokens"]


@pytest.mark.parametrize("task", RULER_TASKS)
def test_fits_the_length_and_nearly_fills_it(task, tokenizer, data_dir):
    for n_tokens in LENGTHS:
        rows = build_examples(task, tokenizer, n_tokens, 2, data_dir=data_dir)
        lengths = [n_tokens_of(row, tokenizer) for row in rows]
        assert max(lengths) <= n_tokens
        if task in SIZED:
            assert min(lengths) >= 0.95 * n_tokens


@pytest.mark.parametrize("task", RULER_TASKS)
def test_is_sized_with_the_tokenizer_at_hand(task, coarse_tokenizer, data_dir):
    n_tokens = 4000  # of a tokenizer that needs three times as many
    (row,) = build_examples(task, coarse_tokenizer, n_tokens, 1, data_dir=data_dir)
    length = n_tokens_of(row, coarse_tokenizer)
    assert length <= n_tokens
    if task in SIZED:
        assert length >= 0.95 * n_tokens


@pytest.mark.parametrize("task", RULER_TASKS)
def test_rows_have_what_kvpress_expects(task, tokenizer, data_dir, tmp_path):
    rows = build_examples(task, tokenizer, 1500, 2, data_dir=data_dir)
    assert tuple(rows.column_names) == tasks.COLUMNS
    for row in rows:
        assert row["task"] == task and row["answer"] and row["question"] and row["answer_prefix"]
        assert all(answer in row["context"] for answer in row["answer"])
        assert not any(answer in row["question"] + row["answer_prefix"] for answer in row["answer"])
    rows.to_parquet(tmp_path / "test-00000-of-00001.parquet")
    again = load_dataset("parquet", data_files=str(tmp_path / "*.parquet"), split="train", cache_dir=str(tmp_path))
    assert again.to_list() == rows.to_list()


@pytest.mark.parametrize("task", RULER_TASKS)
def test_examples_depend_on_seed_and_index_alone(task, tokenizer, data_dir):
    three = build_examples(task, tokenizer, 1500, 3, seed=1, data_dir=data_dir).to_list()
    assert build_examples(task, tokenizer, 1500, 3, seed=1, data_dir=data_dir).to_list() == three
    assert build_examples(task, tokenizer, 1500, 1, seed=1, data_dir=data_dir).to_list() == three[:1]
    other = build_examples(task, tokenizer, 1500, 3, seed=2, data_dir=data_dir).to_list()
    assert len({json.dumps(row) for row in three + other}) == 6


# --- definitions ------------------------------------------------------------------------------------------------------

N_ANSWERS = {"niah_multivalue": 4, "niah_multiquery": 4}
N_NEEDLES = {"niah_multikey_1": 4, **N_ANSWERS}
NEEDLE = re.compile(r"One of the special magic (\w+)s for (\S+) is: (\S+)\.(?=\s)")


@pytest.mark.parametrize("task", NEEDLES)
def test_needles(task, tokenizer):
    for row in build_examples(task, tokenizer, 3000, 3):
        found = NEEDLE.findall(row["context"])
        uuids = task in ("niah_single_3", "niah_multikey_3")
        assert {kind for kind, *_ in found} == {"uuid" if uuids else "number"}
        values = {}
        for _, key, value in found:
            values.setdefault(key, []).append(value)
        asked = [key for key in values if key in row["question"]]
        assert sorted(value for key in asked for value in values[key]) == sorted(row["answer"])
        assert all(key in row["answer_prefix"] for key in asked)
        assert len(row["answer"]) == N_ANSWERS.get(task, 1)
        assert len(asked) == (4 if task == "niah_multiquery" else 1)
        if task in ("niah_multikey_2", "niah_multikey_3"):
            assert len(found) > 25 and len(asked) == 1
        else:
            assert len(found) == N_NEEDLES.get(task, 1)
        plural = "s" if len(row["answer"]) > 1 else ""
        start = f"{'What are all' if plural else 'What is'} the special magic {'uuid' if uuids else 'number'}{plural}"
        assert row["question"].startswith(start) and row["max_new_tokens"] == 128


def test_no_distractor_has_the_key_that_is_asked_for(tokenizer, monkeypatch):
    monkeypatch.setattr(tasks.words, "ADJECTIVES", ["amber", "bold"])
    monkeypatch.setattr(tasks.words, "NOUNS", ["anchor", "basin"])
    for row in build_examples("niah_multikey_2", tokenizer, 1000, 3):
        keys = [key for _, key, _ in NEEDLE.findall(row["context"])]
        assert len(set(keys)) == 4 and [keys.count(key) for key in set(keys) if key in row["question"]] == [1]


def test_haystacks(tokenizer):
    (noise,) = build_examples("niah_single_1", tokenizer, 2000, 1)
    lines = noise["context"].strip().split("\n")[1:]
    assert Counter(lines).most_common(1)[0] == (NOISE, len(lines) - 1)
    (prose,) = build_examples("niah_single_2", tokenizer, 2000, 1)
    assert NOISE not in prose["context"] and len(set(prose["context"].split())) > 300


@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2"])
def test_needles_lie_at_all_depths(task, tokenizer):
    rows = build_examples(task, tokenizer, 800, 40)
    depths = [row["context"].index(row["answer"][0]) / len(row["context"]) for row in rows]
    assert min(depths) < 0.25 and max(depths) > 0.8 and 0.4 < sum(depths) / len(depths) < 0.75


def test_prose_begins_again_where_it_ends():
    prose, prose_words = tasks.words.prose, tasks.words.prose_words
    n_words = len(prose_words())
    text = " ".join(prose(2 * n_words + 5, n_words - 3)).split()
    assert len(text) == 2 * n_words + 5
    assert text[:3] == list(prose_words()[-3:]) and text[3:6] == list(prose_words()[:3])


def test_variable_tracking(tokenizer):
    for row in build_examples("vt", tokenizer, 2000, 3):
        solved, asked = row["context"].split("\n\nMemorize", 1)
        for text, n_letters in ((solved, 3), (asked, 5)):
            steps = re.findall(r"VAR ([A-Z]+) = (?:VAR )?([A-Z]+|\d+)", text)
            names = [name for name, _ in steps]
            assert [source for _, source in steps][1:] == names[:-1] and steps[0][1].isdigit()
            assert len(set(names)) == 5 and {len(name) for name in names} == {n_letters}
        assert row["answer"] == names and steps[0][1] in row["question"]
        assert solved.endswith(" ".join(re.findall(r"VAR ([A-Z]+) =", solved)))
        assert row["max_new_tokens"] == 30


@pytest.mark.parametrize("n_tokens, common, other", [(2500, 6, 1), (6000, 30, 3)])
def test_common_words(n_tokens, common, other, tokenizer):
    for row in build_examples("cwe", tokenizer, n_tokens, 2):
        solved, asked = row["context"].split("\nQuestion:")[0], row["context"].rsplit("\nBelow", 1)[1]
        numbers, words = zip(*re.findall(r"(\d+)\. (\S+)", asked), strict=True)
        assert list(map(int, numbers)) == list(range(1, len(words) + 1))
        counts = Counter(words)
        assert sorted(w for w, n in counts.items() if n == common) == sorted(row["answer"])
        assert set(counts.values()) == {common, other} and len(row["answer"]) == 10
        assert len(re.findall(r"\d+\. \S+", solved)) == (40 if n_tokens < 4096 else 190)
        assert row["max_new_tokens"] == 120


def test_common_words_go_on_with_compounds(tokenizer):
    distinct_words, single_words = tasks.words.distinct_words, tasks.words.single_words
    words = distinct_words(random.Random(0), len(single_words()) + 50)
    assert len(set(words)) == len(words) and sum("-" in word for word in words) == 50
    assert not any("-" in word for word in distinct_words(random.Random(0), 1000))


@pytest.mark.parametrize("n_tokens", [500, 3000])
def test_frequent_words(n_tokens, tokenizer):
    for row in build_examples("fwe", tokenizer, n_tokens, 2):
        text = row["context"].split("coded words. ", 1)[1].split()
        ranked = [word for word, _ in Counter(text).most_common()]
        counts = [Counter(text)[word] for word in ranked]
        assert ranked[0] == "..." and ranked[1:4] == row["answer"]
        assert counts[3] > counts[4]
        n_draws = counts[0] * 3.14159265**2 / 6
        assert all(abs(count - n_draws / k**2 / 1.6449) < 2 for k, count in enumerate(counts[:5], start=1))
        assert all(len(word) == 6 for word in ranked[1:]) and row["max_new_tokens"] == 50


def test_questions(tokenizer, data_dir):
    for task, n_own in (("qa_1", 1), ("qa_2", 3)):
        rows = build_examples(task, tokenizer, 900, 8, data_dir=data_dir)
        assert len(set(rows["question"])) == 8
        for row in rows:
            lot, answer = re.search(r"lot (\d+)", row["question"])[1], row["answer"][0]
            assert answer == f"number {lot}777"
            documents = re.findall(r"Document (\d+):\n(.*?)(?=\n\n)", row["context"], re.S)
            assert [int(i) for i, _ in documents] == list(range(1, len(documents) + 1))
            assert sum(answer in text for _, text in documents) == 1
            assert sum(f"Lot {lot[0]}" in text for _, text in documents) == 3  # the article comes before others
            assert len(documents) > n_own and row["max_new_tokens"] == 32
    first, second = (tasks.READER[task](data_dir).questions for task in ("qa_1", "qa_2"))
    assert {q.text for q in first}.isdisjoint(q.text for q in second) and len(first) + len(second) == 48


def test_all_documents_are_enough(tokenizer, data_dir):
    (row,) = build_examples("qa_1", tokenizer, 7000, 1, data_dir=data_dir)
    assert row["context"].count("Document ") == 12


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder with miniature copies of SQuAD 2 and HotpotQA as the hub has them, and an empty cache."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    contexts = ["A fox ran.", "A dog sat.", "A cat slept."]
    squad = [
        {"title": "Fox", "context": contexts[0], "question": "What did the fox do?", "answers": ["ran", "run"]},
        {"title": "Fox", "context": contexts[0], "question": "Why?", "answers": []},  # SQuAD 2: without an answer
        {"title": "Fox", "context": contexts[1], "question": "What did the dog do?", "answers": ["sat"]},
        {"title": "Cat", "context": contexts[2], "question": "What did the cat do?", "answers": ["slept"]},
    ]
    for row in squad:
        row["answers"] = {"text": row["answers"], "answer_start": [0] * len(row["answers"])}
    hotpot = [
        {
            "question": "Who sat by the fox?",
            "answer": "the dog",
            "context": {"title": ["Fox", "Dog"], "sentences": [["A fox ran.", " It was red."], ["A dog sat."]]},
        },
        {"question": "Who slept?", "answer": "the cat", "context": {"title": ["Cat"], "sentences": [["A cat slept."]]}},
    ]
    for name, rows in (("squad_v2", squad), ("hotpot_qa", hotpot)):
        path = tmp_path / name / "validation-00000-of-00001.parquet"
        path.parent.mkdir()
        datasets.Dataset.from_list(rows).to_parquet(path)
    return tmp_path


def test_reads_squad(hub, tokenizer):
    data = tasks.READER["qa_1"](hub)
    assert data.documents == ("A cat slept.", "A dog sat.", "A fox ran.")
    assert [(q.text, q.answers, q.documents, q.related) for q in data.questions] == [
        ("What did the fox do?", ("ran", "run"), (2,), (1,)),
        ("What did the dog do?", ("sat",), (1,), (2,)),
        ("What did the cat do?", ("slept",), (0,), ()),
    ]
    assert build_examples("qa_1", tokenizer, 400, 3, data_dir=hub).num_rows == 3
    with pytest.raises(ValueError, match=r"n_examples must be at most 3 for task 'qa_1': .*squad_v2 has no more"):
        build_examples("qa_1", tokenizer, 400, 4, data_dir=hub)


def test_reads_hotpotqa(hub, tokenizer):
    data = tasks.READER["qa_2"](hub)
    assert data.documents == ("Fox\nA fox ran. It was red.", "Dog\nA dog sat.", "Cat\nA cat slept.")
    assert [(q.answers, q.documents) for q in data.questions] == [(("the dog",), (0, 1)), (("the cat",), (2,))]
    assert build_examples("qa_2", tokenizer, 400, 2, data_dir=hub).num_rows == 2


def test_reads_ready_examples(hub, tokenizer):
    import datasets

    parts = [build_examples(task, tokenizer, 800, 2) for task in ("vt", "fwe")]
    path = hub / "ruler" / "800" / "test-00000-of-00001.parquet"
    path.parent.mkdir(parents=True)
    datasets.concatenate_datasets(parts).to_parquet(path)
    assert tasks.load_ruler("fwe", 800, 2, str(hub / "ruler")).to_list() == parts[1].to_list()
    with pytest.raises(ValueError, match="n_examples must be at most 2 for task 'vt'"):
        tasks.load_ruler("vt", 800, 3, str(hub / "ruler"))


def test_without_a_data_folder_the_hub_is_asked(tokenizer, monkeypatch):
    monkeypatch.delenv("VERKV_DATA", raising=False)
    for load, name in (
        (lambda: build_examples("qa_1", tokenizer, 900, 1), "rajpurkar/squad_v2"),
        (lambda: build_examples("qa_2", tokenizer, 900, 1), "hotpotqa/hotpot_qa"),
        (lambda: tasks.load_ruler("vt", 4096, 1), "simonjegou/ruler"),
    ):
        with pytest.raises(ValueError, match=f"cannot load data set '{name}' .*--data-dir or VERKV_DATA") as error:
            load()
        assert "\n" not in str(error.value)


def test_with_xquad(tokenizer):
    folder = os.environ.get("VERKV_DATA")
    if not folder or not Path(folder, "xquad.en.json").is_file():
        pytest.skip("VERKV_DATA does not name a folder with xquad.en.json")
    for task in ("qa_1", "qa_2"):
        rows = build_examples(task, tokenizer, 3000, 8)
        lengths = [n_tokens_of(row, tokenizer) for row in rows]
        assert max(lengths) <= 3000 and min(lengths) > 2400
        assert all(row["answer"][0] in row["context"] for row in rows)
        assert tasks.source_of(task, 3000) == "XQuAD English"


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", RULER_TASKS)
def test_too_short(task, tokenizer, data_dir):
    with pytest.raises(ValueError, match=f"n_tokens must be at least .* for example 0 of task '{task}', got 100") as e:
        build_examples(task, tokenizer, 100, 1, data_dir=data_dir)
    least = int(re.search(r"at least (\d+)", str(e.value))[1])
    assert build_examples(task, tokenizer, least, 1, data_dir=data_dir).num_rows == 1
    with pytest.raises(ValueError, match=f"at least {least}"):
        build_examples(task, tokenizer, least - 1, 1, data_dir=data_dir)


def test_bad_arguments(tokenizer, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"task must be one of niah_single_1, .*loft_quest; got 'niah'"):
        build_examples("niah", tokenizer, 1000, 1)
    for name, value in (("n_tokens", 0), ("n_tokens", 1e3), ("n_examples", 0), ("seed", -1)):
        arguments = {"n_tokens": 1000, "n_examples": 1, "seed": 0, name: value}
        with pytest.raises(ValueError, match=f"{name} must be an integer"):
            build_examples("vt", tokenizer, **arguments)
    with pytest.raises(ValueError, match=r"data_dir is '.*nowhere', which is not a folder"):
        build_examples("qa_1", tokenizer, 1000, 1, data_dir=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has neither squad_v2/ nor xquad\.en\.json"):
        build_examples("qa_1", tokenizer, 1000, 1, data_dir=tmp_path)
    (tmp_path / "xquad.en.json").write_text('{"data": 3}')
    with pytest.raises(ValueError, match=r"xquad\.en\.json is not in SQuAD's format"):
        build_examples("qa_2", tokenizer, 1000, 1, data_dir=tmp_path)
    monkeypatch.setenv("VERKV_DATA", str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"VERKV_DATA is '.*gone', which is not a folder"):
        build_examples("qa_1", tokenizer, 1000, 1)


def test_a_model_without_chat_template_is_refused(coarse_tokenizer):
    import copy

    bare = copy.deepcopy(coarse_tokenizer)
    bare.chat_template = None
    with pytest.raises(ValueError, match="has no chat template: choose an instruction-tuned model"):
        build_examples("vt", bare, 2000, 1)
