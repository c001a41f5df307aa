"""The results file: what a killed process leaves, several processes, files that are something else."""

import json
import multiprocessing

import pytest

from verkv.evaluation.results import ResultsFile, answer_id, read_results

LINES = [{"id": f"{i:016x}", "prediction": 'é "quoted"\n\u2028' * i, "score": i / 7} for i in range(4)]


def text_of(lines) -> bytes:
    return b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)


def fill(path, lines=LINES):
    results = ResultsFile(path)
    return [results.append(line) for line in lines]


def test_lines_come_back(tmp_path):
    path = tmp_path / "new" / "folder" / "r.jsonl"
    assert fill(path) == [True] * 4
    assert path.read_bytes() == text_of(LINES)
    assert read_results(path) == LINES
    assert ResultsFile(path).ids == {line["id"] for line in LINES}


def test_nothing_is_made_before_the_first_line(tmp_path):
    ResultsFile(tmp_path / "folder" / "r.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_an_answer_is_written_once(tmp_path):
    fill(tmp_path / "r.jsonl")
    assert fill(tmp_path / "r.jsonl") == [False] * 4
    assert read_results(tmp_path / "r.jsonl") == LINES


def test_a_file_cut_anywhere_is_completed(tmp_path):
    path, whole = tmp_path / "r.jsonl", text_of(LINES)
    for n_bytes in range(len(whole) + 1):
        path.write_bytes(whole[:n_bytes])
        n_complete = whole[:n_bytes].count(b"\n")
        assert read_results(path) == LINES[:n_complete]
        assert fill(path) == [False] * n_complete + [True] * (4 - n_complete)
        assert path.read_bytes() == whole


def test_lines_of_another_process_are_seen(tmp_path):
    first, second = ResultsFile(tmp_path / "r.jsonl"), ResultsFile(tmp_path / "r.jsonl")
    assert first.append(LINES[0]) and second.append(LINES[1])
    assert not first.append(LINES[1]) and not second.append(LINES[0])
    assert first.append(LINES[2])
    assert read_results(tmp_path / "r.jsonl") == LINES[:3]


def append_many(path, first, n_lines):
    results = ResultsFile(path)
    for i in range(first, first + n_lines):
        results.append({"id": f"{i:016x}", "padding": "x" * (i % 5000)})


def test_two_processes_write_one_file(tmp_path):
    """Their answers overlap; each line is there once and whole."""
    path = tmp_path / "r.jsonl"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=append_many, args=(path, first, 60)) for first in (0, 30)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted(line["id"] for line in read_results(path)) == [f"{i:016x}" for i in range(90)]


@pytest.mark.parametrize(
    "content", [b"\x89PNG\r\n\x1a\n\0\0", b"# Title\n", b'{"no": "id"}\n', b"[1, 2]\n", b"{", b"half a sentence"]
)
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    if content == b"{":  # may be the beginning of a line
        fill(path)
        assert read_results(path) == LINES
        return
    with pytest.raises(ValueError, match="output"):
        fill(path)
    assert path.read_bytes() == content


def test_a_damaged_line_in_the_middle_is_no_reason_to_go_on(tmp_path):
    path = tmp_path / "r.jsonl"
    damaged = text_of(LINES).replace(b'"score"', b"score", 1)
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="no result"):
        ResultsFile(path)
    with pytest.raises(ValueError, match="no result"):
        read_results(path)


@pytest.mark.parametrize("name", [".", "file/r.jsonl"])
def test_a_place_that_cannot_be_written_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        ResultsFile(tmp_path / name)


def test_no_results(tmp_path):
    with pytest.raises(ValueError, match="no results at"):
        read_results(tmp_path / "r.jsonl")


def test_id_depends_on_every_fact_and_not_on_their_order():
    facts = {"task": "vt", "compression": 16.0, "options": {"alpha": 0.5, "n_sink": 8}}
    same = {"options": {"n_sink": 8, "alpha": 0.5}, "compression": 16.0, "task": "vt"}
    others = [facts | {"task": "cwe"}, facts | {"compression": 8.0}, facts | {"options": {"alpha": 0.5, "n_sink": 9}}]
    assert answer_id(facts) == answer_id(same)
    assert len({answer_id(x) for x in [facts, *others]}) == 4
    assert len(answer_id(facts)) == 16 and int(answer_id(facts), 16) >= 0


def test_a_number_that_json_does_not_know_is_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        fill(tmp_path / "r.jsonl", [{"id": "0", "score": float("nan")}])
    assert not (tmp_path / "r.jsonl").exists()
