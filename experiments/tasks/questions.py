"""RULER's two QA tasks: a question, the documents it is about, and other documents around them."""

import random
from functools import cache
from pathlib import Path

from .prompt import Example, Prompt, largest_fitting
from .sources import Question, QuestionSet, multi_hop_questions, single_hop_questions

MAX_NEW_TOKENS = 32
READER = {"qa_1": single_hop_questions, "qa_2": multi_hop_questions}
INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)


def question_example(name: str, prompt: Prompt, n_tokens: int, seed: int, index: int, data_dir: Path | None) -> Example:
    """Example `index` of a QA task, of at most `n_tokens` tokens; TooShort if its documents do not fit."""
    data = READER[name](data_dir)
    order = _order(name, len(data.questions), seed)
    if index >= len(order):
        raise ValueError(f"n_examples must be at most {len(order)} for task {name!r}: {data.source} has no more")
    question = data.questions[order[index]]
    return largest_fitting(
        lambda n: _render(name, data, question, n, random.Random(f"{name}/{seed}/{index}")),
        prompt.count,
        n_tokens,
        len(question.documents),
        len(data.documents),
    )


@cache
def _order(name: str, n_questions: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(f"{name}/{seed}").sample(range(n_questions), n_questions))


def _render(name: str, data: QuestionSet, question: Question, n_documents: int, rng: random.Random) -> Example:
    chosen = _choose(question, n_documents, len(data.documents), rng)
    documents = "\n\n".join(f"Document {i}:\n{data.documents[j]}" for i, j in enumerate(chosen, start=1))
    return Example(
        context=f"{INSTRUCTION}\n\nThe following are given documents.\n\n{documents}\n\n",
        question=f"{INSTRUCTION}\n\nQuestion: {question.text}",
        answer_prefix="Answer:",
        answer=list(question.answers),
        task=name,
        max_new_tokens=MAX_NEW_TOKENS,
    )


def _choose(question: Question, n_documents: int, n_all: int, rng: random.Random) -> list[int]:
    """The question's documents, then related ones, then any others, in random order."""
    own, related = list(question.documents), list(question.related)
    others = sorted(set(range(n_all)) - set(own) - set(related))
    for part in (related, others):
        rng.shuffle(part)
    chosen = (own + related + others)[:n_documents]
    rng.shuffle(chosen)
    return chosen
