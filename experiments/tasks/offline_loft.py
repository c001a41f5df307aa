"""Data sets in LOFT's format made from XQuAD, for machines without a network.

    python -m verkv.evaluation.tasks.offline_loft --out DIR [--data-dir DIR_WITH_XQUAD]

They exercise the same reader, prompt and scores, with real paragraphs and questions. XQuAD's questions are of one hop
and one answer, so three of the five are composed:

=========  ============================================================================================================
nq         A question of XQuAD.
hotpotqa   Two hops: the record number (in a register passage) of the answer to a question.
musique    Three hops: the room (in a store passage) that keeps the record with that number.
qampari    Two or three questions at once, whose answers lie in different articles; all answers are wanted.
quest      The titles of the articles that answer two or three questions.
=========  ============================================================================================================
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from .loft_format import FEW_SHOT, LoftData, Passage, Query
from .scores import normalise
from .sources import XQUAD, Paragraph, data_folder, read_xquad
from .words import new_ones, random_word

LENGTH = "64k"  # a corpus takes 47,000 to 57,000 tokens
N_DEV, N_TEST = 10, 100  # as in LOFT
# Solved examples; LOFT has 5 everywhere. Their passages are in every prompt: with fewer, short contexts can be made.
N_FEW_SHOT = {"nq": 4, "hotpotqa": 3, "musique": 2, "qampari": 2, "quest": 2}


@dataclass
class _Draft:
    """What a data set is drawn from, and what has been added to its corpus."""

    rng: random.Random
    paragraphs: tuple[Paragraph, ...]
    pairs: list[tuple[int, str, str]]  # paragraph, question, answer, in the order in which they are used up
    added: list[Passage] = field(default_factory=list)
    rooms: set[str] = field(default_factory=set)
    numbers: set[str] = field(default_factory=set)

    def add(self, title: str, text: str) -> str:
        pid = f"added{len(self.added)}"
        self.added.append(Passage(pid, title, text))
        return pid


@cache
def loft_from_xquad(name: str, path: Path) -> LoftData:
    """A data set in LOFT's format, from XQuAD.

    Parameters
    ----------
    name : {"nq", "hotpotqa", "musique", "qampari", "quest"}
    path : Path
        A file in SQuAD's format.

    Returns
    -------
    LoftData
        With 100 test queries, or as many as the file's questions are enough for.

    Raises
    ------
    ValueError
        If the file has too few questions for the solved examples and one query of each kind.
    """
    draft = _draft(name, read_xquad(path))
    make = _MAKERS[name]
    few_shot = [make(draft, f"{FEW_SHOT}{i}", 2) for i in range(N_FEW_SHOT[name])]
    queries = [make(draft, f"query{i}", 2 + i % 2) for i in range(N_DEV + N_TEST)]
    queries = [query for query in queries if query is not None]
    n_dev = min(N_DEV, len(queries) // 2)
    if None in few_shot or n_dev == 0:
        raise ValueError(f"{path.name} has too few questions for an offline {name}")
    corpus = [Passage(f"paragraph{i}", p.title, p.text) for i, p in enumerate(draft.paragraphs)] + draft.added
    draft.rng.shuffle(corpus)
    source = f"XQuAD English in LOFT's format, {name}"
    return LoftData(source, tuple(corpus), tuple(few_shot), tuple(queries[:n_dev]), tuple(queries[n_dev:]))


def _draft(name: str, paragraphs: tuple[Paragraph, ...]) -> _Draft:
    """Questions in random order, no two with the same answer: a register must not be ambiguous."""
    rng = random.Random(f"loft/{name}")
    pairs = [(i, question, answer) for i, p in enumerate(paragraphs) for question, answer in p.questions]
    rng.shuffle(pairs)
    first: dict[str, tuple[int, str, str]] = {}
    for pair in pairs:
        first.setdefault(normalise(pair[2]), pair)
    return _Draft(rng, paragraphs, [pair for answer, pair in first.items() if answer])


def _one_hop(draft: _Draft, qid: str, _n: int) -> Query | None:
    if not draft.pairs:
        return None
    paragraph, question, answer = draft.pairs.pop()
    return Query(qid, question, (answer,), (f"paragraph{paragraph}",))


def _register(draft: _Draft, qid: str) -> tuple[str, str, tuple[str, ...]] | None:
    """A question, the record number of its answer, and the passages that lead there."""
    if not draft.pairs:
        return None
    paragraph, question, answer = draft.pairs.pop()
    (number,) = new_ones(lambda rng: str(rng.randint(10_000, 99_999)), draft.rng, 1, draft.numbers)
    pid = draft.add("Register", f'The record number of "{answer}" is {number}.')
    return question, number, (f"paragraph{paragraph}", pid)


def _two_hops(draft: _Draft, qid: str, _n: int) -> Query | None:
    if (found := _register(draft, qid)) is None:
        return None
    question, number, passages = found
    return Query(qid, f"What is the record number of the answer to this question: {question}", (number,), passages)


def _three_hops(draft: _Draft, qid: str, _n: int) -> Query | None:
    if (found := _register(draft, qid)) is None:
        return None
    question, number, passages = found
    (room,) = new_ones(random_word, draft.rng, 1, draft.rooms)
    pid = draft.add("Store", f"The record with number {number} is kept in the room {room}.")
    text = f"Which room keeps the record whose number is that of the answer to this question: {question}"
    return Query(qid, text, (room,), (*passages, pid))


def _several(draft: _Draft, n: int) -> list[tuple[int, str, str]] | None:
    """`n` questions about different articles, taken from the draft."""
    taken, titles = [], set()
    for pair in reversed(draft.pairs):
        title = draft.paragraphs[pair[0]].title
        if title not in titles and len(taken) < n:
            taken.append(pair)
            titles.add(title)
    if len(taken) < n:
        return None
    draft.pairs = [pair for pair in draft.pairs if pair not in taken]
    return taken


def _all_answers(draft: _Draft, qid: str, n: int) -> Query | None:
    if (taken := _several(draft, n)) is None:
        return None
    text = "What are the answers to all of these questions: " + " ".join(question for _, question, _ in taken)
    answers, passages = tuple(answer for *_, answer in taken), tuple(f"paragraph{i}" for i, *_ in taken)
    return Query(qid, text, answers, passages)


def _all_titles(draft: _Draft, qid: str, n: int) -> Query | None:
    if (taken := _several(draft, n)) is None:
        return None
    text = "What are the titles of the documents that answer these questions: "
    text += " ".join(question for _, question, _ in taken)
    titles, passages = tuple(draft.paragraphs[i].title for i, *_ in taken), tuple(f"paragraph{i}" for i, *_ in taken)
    return Query(qid, text, titles, passages)


_MAKERS: dict[str, Callable[[_Draft, str, int], Query | None]] = {
    "nq": _one_hop,
    "hotpotqa": _two_hops,
    "musique": _three_hops,
    "qampari": _all_answers,
    "quest": _all_titles,
}


def write_loft(data: LoftData, folder: Path) -> None:
    """Write a data set in LOFT's format into `folder`, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    passages = [{"pid": p.pid, "title_text": p.title, "passage_text": p.text, "metadata": {}} for p in data.corpus]
    _write_lines(folder / "corpus.jsonl", passages)
    for split, queries in ((FEW_SHOT, data.few_shot), ("dev", data.dev), ("test", data.test)):
        rows = [
            {
                "qid": query.qid,
                "query_text": query.text,
                "metadata": {"qrels": [[pid, 1] for pid in query.passages]},
                "answers": list(query.answers),
            }
            for query in queries
        ]
        _write_lines(folder / f"{split}_queries.jsonl", rows)


def _write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Write all five data sets."""
    parser = argparse.ArgumentParser(prog="offline_loft", description="Make data sets in LOFT's format from XQuAD.")
    parser.add_argument("--out", type=Path, required=True, help="folder for rag/NAME/64k/")
    parser.add_argument("--data-dir", type=Path, help=f"folder with {XQUAD} (default: VERKV_DATA)")
    options = parser.parse_args(arguments)
    try:
        root = data_folder(options.data_dir)
        if root is None or not (root / XQUAD).is_file():
            raise ValueError(f"{XQUAD} not found: name its folder with --data-dir or VERKV_DATA")
        for name in _MAKERS:
            folder = options.out / "rag" / name / LENGTH
            data = loft_from_xquad(name, root / XQUAD)
            write_loft(data, folder)
            print(f"{folder}: {len(data.corpus)} passages, {len(data.test)} test queries")
    except (ValueError, OSError) as error:
        print(f"offline_loft: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
