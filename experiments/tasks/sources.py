"""Where questions and passages come from: a folder on this machine, or the hub by name."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

XQUAD = "xquad.en.json"
# Name on the hub, configuration; a folder with the name's last part in the data folder is read in its place.
SQUAD = ("rajpurkar/squad_v2", None)
HOTPOTQA = ("hotpotqa/hotpot_qa", "distractor")


@dataclass(frozen=True)
class Question:
    """A question about documents.

    Attributes
    ----------
    text : str
    answers : tuple of str
        Alternatives.
    documents : tuple of int
        Documents that belong to it: all are part of its prompt.
    related : tuple of int
        Documents to be taken first as distractors.
    """

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionSet:
    """Documents, and questions about them by their indices. ``source`` says what it is, in words."""

    source: str
    documents: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of XQuAD: its article's title, its text, and (question, answer) pairs."""

    title: str
    text: str
    questions: tuple[tuple[str, str], ...]


def data_folder(data_dir: Path | str | None) -> Path | None:
    """The folder for data that is not part of the package: `data_dir`, else ``VERKV_DATA``, else None.

    Raises
    ------
    ValueError
        If it is named but does not exist.
    """
    named = data_dir or os.environ.get("VERKV_DATA")
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        origin = "data_dir" if data_dir else "VERKV_DATA"
        raise ValueError(f"{origin} is {str(named)!r}, which is not a folder")
    return folder


def single_hop_questions(data_dir: Path | str | None) -> QuestionSet:
    """SQuAD, or XQuAD in its place: a question, its paragraph, and the other paragraphs of the article as distractors.

    Parameters
    ----------
    data_dir : Path or None
        Folder with ``squad_v2/`` (a copy of the hub's data set) or ``xquad.en.json``. None: ``VERKV_DATA``, and if
        that is not set, the hub.

    Raises
    ------
    ValueError
        If there is no data.
    """
    return _questions(data_dir, SQUAD, from_squad, lambda path: from_xquad(path, by_article=False))


def multi_hop_questions(data_dir: Path | str | None) -> QuestionSet:
    """HotpotQA, or XQuAD in its place: a question and the paragraphs that it comes with.

    As `single_hop_questions`, with ``hotpot_qa/``. XQuAD has no question of several hops: each comes with the five
    paragraphs of its article, as HotpotQA's come with ten, and one of them answers it.
    """
    return _questions(data_dir, HOTPOTQA, from_hotpotqa, lambda path: from_xquad(path, by_article=True))


def _questions(data_dir: Path | str | None, hub: tuple, from_rows: Callable, from_file: Callable) -> QuestionSet:
    folder = data_folder(data_dir)
    name, config = hub
    if folder is None:
        return _from_hub(name, config, from_rows)
    copy, xquad = folder / name.split("/")[-1], folder / XQUAD
    if copy.is_dir():
        return _from_hub(str(copy), None, from_rows)
    if xquad.is_file():
        return from_file(xquad)
    raise ValueError(f"the data folder {str(folder)!r} has neither {copy.name}/ nor {XQUAD}")


@cache
def _from_hub(name: str, config: str | None, from_rows: Callable) -> QuestionSet:
    return from_rows(load(name, name=config, split="validation"), name)


def load(path: str, **options):
    """``datasets.load_dataset``, of a folder or from the hub.

    Raises
    ------
    ValueError
        In one line, with what can be done, where the hub cannot be reached or knows no such data set.
    """
    import datasets

    try:
        return datasets.load_dataset(path, **options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # offline is an OSError
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"cannot load data set {path!r} ({reason}); without a network name a data folder: --data-dir or VERKV_DATA"
        ) from error


def from_squad(rows, source: str) -> QuestionSet:
    """The questions of SQuAD 2 that have an answer; `rows` with title, context, question and answers."""
    documents = sorted(set(rows["context"]))
    index = {text: i for i, text in enumerate(documents)}
    articles: dict[str, set[int]] = {}
    for title, text in zip(rows["title"], rows["context"], strict=True):
        articles.setdefault(title, set()).add(index[text])
    questions = []
    for row in rows:
        if row["answers"]["text"]:
            own = index[row["context"]]
            related = tuple(sorted(articles[row["title"]] - {own}))
            questions.append(Question(row["question"], tuple(row["answers"]["text"]), (own,), related))
    return QuestionSet(source, tuple(documents), tuple(questions))


def from_hotpotqa(rows, source: str) -> QuestionSet:
    """HotpotQA's distractor setting; `rows` with question, answer and context (title, sentences)."""
    index: dict[str, int] = {}
    questions = []
    for row in rows:
        pairs = zip(row["context"]["title"], row["context"]["sentences"], strict=True)
        own = [index.setdefault(f"{title}\n{''.join(sentences)}", len(index)) for title, sentences in pairs]
        questions.append(Question(row["question"], (row["answer"],), tuple(dict.fromkeys(own))))
    return QuestionSet(source, tuple(index), tuple(questions))


@cache
def from_xquad(path: Path, by_article: bool) -> QuestionSet:
    """Every other question of XQuAD, so that the two QA tasks share none.

    With `by_article` a document begins with its article's title and a question comes with the whole article, else it
    comes with its paragraph, and the article's others are related.
    """
    paragraphs = read_xquad(path)
    questions = []
    for i, paragraph in enumerate(paragraphs):
        article = [j for j, other in enumerate(paragraphs) if other.title == paragraph.title]
        own = tuple(article) if by_article else (i,)
        related = tuple(j for j in article if j not in own)
        questions += [Question(text, (answer,), own, related) for text, answer in paragraph.questions]
    documents = tuple(f"{p.title}\n{p.text}" if by_article else p.text for p in paragraphs)
    return QuestionSet("XQuAD English", documents, tuple(questions[int(by_article) :: 2]))


@cache
def read_xquad(path: Path) -> tuple[Paragraph, ...]:
    """All paragraphs of a file in SQuAD's format, titles with spaces.

    Raises
    ------
    ValueError
        If it is not such a file.
    """
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        return tuple(
            Paragraph(
                article["title"].replace("_", " "),
                paragraph["context"],
                tuple((qa["question"], qa["answers"][0]["text"]) for qa in paragraph["qas"] if qa["answers"]),
            )
            for article in articles
            for paragraph in article["paragraphs"]
        )
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} is not in SQuAD's format: {type(error).__name__} {error}") from error
