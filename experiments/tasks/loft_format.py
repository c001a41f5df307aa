"""LOFT's folder format: a corpus and its queries.

https://github.com/google-deepmind/loft; a data set's folder holds ``corpus.jsonl``, ``dev_queries.jsonl``,
``test_queries.jsonl`` and ``few_shot_queries.jsonl`` in one folder per length (``32k``, ``128k``, ``1m``).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FEW_SHOT = "few_shot"


@dataclass(frozen=True)
class Passage:
    """A document of the corpus."""

    pid: str
    title: str
    text: str


@dataclass(frozen=True)
class Query:
    """A query, its answers (alternatives, or all wanted: the task's matter) and the passages they are in."""

    qid: str
    text: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]


@dataclass(frozen=True)
class LoftData:
    """A data set of LOFT at one length. ``source`` says what it is, in words."""

    source: str
    corpus: tuple[Passage, ...]
    few_shot: tuple[Query, ...]
    dev: tuple[Query, ...]
    test: tuple[Query, ...]


def read_loft(folder: Path) -> LoftData:
    """Read a data set in LOFT's format.

    Parameters
    ----------
    folder : Path
        With ``corpus.jsonl`` and three files of queries.

    Returns
    -------
    LoftData

    Raises
    ------
    ValueError
        If a file or a field is missing, or a query names a passage that the corpus lacks.
    """
    corpus = tuple(
        Passage(str(row["pid"]), row.get("title_text") or "None", row["passage_text"].strip())
        for row in _rows(folder / "corpus.jsonl", ("pid", "passage_text"))
    )
    known = {passage.pid for passage in corpus}
    queries = [_read_queries(folder / f"{split}_queries.jsonl", known) for split in (FEW_SHOT, "dev", "test")]
    return LoftData(f"LOFT, {folder.parent.name}/{folder.name}", corpus, *queries)


def _read_queries(path: Path, known: set[str]) -> tuple[Query, ...]:
    queries = []
    for row in _rows(path, ("qid", "query_text", "answers", "metadata")):
        passages = tuple(str(pid) for pid, _relevance in row["metadata"]["qrels"])
        if missing := sorted(set(passages) - known):
            raise ValueError(f"{path}: query {row['qid']} names passages that corpus.jsonl lacks: {missing}")
        queries.append(Query(str(row["qid"]), row["query_text"].strip(), tuple(row["answers"]), passages))
    return tuple(queries)


def _rows(path: Path, fields: tuple[str, ...]) -> Iterator[dict]:
    """The objects of a JSON-lines file, which have all `fields`."""
    if not path.is_file():
        raise ValueError(f"{path.name} is missing in the LOFT folder {str(path.parent)!r}")
    with path.open(encoding="utf-8") as lines:
        for i, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {i}: not JSON ({error})") from error
            if missing := [field for field in fields if field not in row]:
                raise ValueError(f"{path}, line {i}: no {', '.join(missing)}")
            yield row
