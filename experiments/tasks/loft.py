"""LOFT's retrieval-augmented tasks: a prompt that holds the corpus, solved examples and a query."""

import random
import re
from functools import cache
from pathlib import Path

from .loft_format import LoftData, Query, read_loft
from .offline_loft import loft_from_xquad
from .prompt import Example, Prompt, largest_fitting
from .sources import XQUAD, data_folder

SINGLE, MULTIPLE = ("nq", "hotpotqa", "musique"), ("qampari", "quest")
MAX_NEW_TOKENS = {**dict.fromkeys(SINGLE, 128), **dict.fromkeys(MULTIPLE, 256)}  # ours: LOFT sets no limit

INSTRUCTION = """\
You will be given a list of documents. You need to read carefully and understand all of them. Then you will be given a \
query, and your goal is to answer the query based on the documents you have read.

Your final answer should be in a list, in the following format:
Final Answer: ['answer1', 'answer2', ...]
If there is only one answer, it should be in the format:
Final Answer: ['answer']

"""
PASSAGE = "ID: {id} | TITLE: {title} | CONTENT: {text} | END ID: {id}\n"
QUERY = """\
====== {heading} ======
Based on the documents above, can you answer the following query? Print out the TITLE and ID of the documents you use \
to answer. Then format the answers into a list.
query: {query}
"""


def find_loft(name: str, n_tokens: int, data_dir: Path | str | None) -> LoftData:
    """The data set `name` in the data folder, at the least length that holds `n_tokens`; without it, one from XQuAD.

    Parameters
    ----------
    name : {"nq", "hotpotqa", "musique", "qampari", "quest"}
    n_tokens : int
    data_dir : Path or None
        Folder with ``data/rag/NAME``, ``rag/NAME`` or ``NAME`` (LOFT's downloads, unpacked), or with
        ``xquad.en.json``. None: ``VERKV_DATA``.

    Raises
    ------
    ValueError
        If there is neither.
    """
    root = data_folder(data_dir)
    if root is None:
        raise ValueError(f"task 'loft_{name}' needs a data folder: --data-dir or VERKV_DATA")
    for folder in (root / "data" / "rag" / name, root / "rag" / name, root / name):
        if folder.is_dir():
            return _read_cached(_length_folder(folder, n_tokens))
    if not (root / XQUAD).is_file():
        raise ValueError(f"the data folder {str(root)!r} has neither LOFT's rag/{name}/ nor {XQUAD}")
    return loft_from_xquad(name, root / XQUAD)


_read_cached = cache(read_loft)


def _length_folder(folder: Path, n_tokens: int) -> Path:
    """The folder of the least length that is at least `n_tokens`, or of the greatest."""
    lengths = {}
    for part in folder.iterdir():
        if match := re.fullmatch(r"(\d+)([km])", part.name):
            lengths[int(match[1]) * {"k": 1000, "m": 1_000_000}[match[2]]] = part
    if not lengths:
        raise ValueError(f"the LOFT folder {str(folder)!r} holds no folder of a length, such as 32k")
    return lengths[min((length for length in lengths if length >= n_tokens), default=max(lengths))]


def loft_example(task: str, prompt: Prompt, n_tokens: int, seed: int, index: int, data_dir: Path | None) -> Example:
    """Test query `index` with as much of the corpus as fits into `n_tokens` tokens; TooShort if its passages do not.

    Passages of the query and of the solved examples are always there. Where the corpus fits as a whole it is the same
    for all queries, as in LOFT; else `seed` chooses what is left out, and the rest keeps its order.
    """
    name = task.removeprefix("loft_")
    data = find_loft(name, n_tokens, data_dir)
    if index >= len(data.test):
        raise ValueError(f"n_examples must be at most {len(data.test)} for task {task!r}: {data.source} has no more")
    query = data.test[index]
    needed = {pid for each in (query, *data.few_shot) for pid in each.passages}
    others = [passage.pid for passage in data.corpus if passage.pid not in needed]
    random.Random(f"{task}/{seed}").shuffle(others)

    def render(n_others: int) -> Example:
        return _render(task, data, query, needed.union(others[:n_others]), MAX_NEW_TOKENS[name])

    return largest_fitting(render, prompt.count, n_tokens, 0, len(others))


def _render(task: str, data: LoftData, query: Query, chosen: set[str], max_new_tokens: int) -> Example:
    passages = {passage.pid: passage for passage in data.corpus if passage.pid in chosen}
    ids = {pid: i for i, pid in enumerate(passages)}
    context = INSTRUCTION
    context += "".join(PASSAGE.format(id=ids[pid], title=p.title, text=p.text) for pid, p in passages.items())
    for i, each in enumerate(data.few_shot, start=1):
        context += "\n" + QUERY.format(heading=f"Example {i}", query=each.text)
        context += "".join(f"TITLE: {passages[pid].title} | ID: {ids[pid]}\n" for pid in each.passages)
        context += f"Final Answer: {list(each.answers)}\n"
    question = QUERY.format(heading="Now let's start!", query=query.text)
    return Example(context + "\n", question, "", list(query.answers), task, max_new_tokens)
