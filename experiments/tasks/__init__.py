"""The evaluation's tasks: RULER's thirteen, and LOFT's five of retrieval-augmented generation.

Each is written from its published definition, yields the columns that KVPress' evaluation expects, and is sized with
the model's own tokenizer. ``docs/tasks.md`` says what each is, where its data comes from, and what differs offline.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from verkv.checks import check_count

from .counting import coded_words_example, common_words_example
from .loft import MULTIPLE, SINGLE, find_loft, loft_example
from .needles import NEEDLE_TASKS, needle_example
from .prompt import Example, Prompt, TooShort
from .questions import READER, question_example
from .scores import aligned_subspan_exact_match, string_match_all, string_match_part, subspan_exact_match
from .sources import load
from .tracing import tracking_example

__all__ = ["COLUMNS", "LOFT_TASKS", "RULER_TASKS", "TASKS", "build_examples", "load_ruler", "score", "source_of"]

SYNTHETIC = {
    **dict.fromkeys(NEEDLE_TASKS, needle_example),
    "vt": tracking_example,
    "cwe": common_words_example,
    "fwe": coded_words_example,
}
RULER_TASKS = (*SYNTHETIC, *READER)
LOFT_TASKS = tuple(f"loft_{name}" for name in (*SINGLE, *MULTIPLE))
TASKS = (*RULER_TASKS, *LOFT_TASKS)
COLUMNS = ("context", "question", "answer_prefix", "answer", "task", "max_new_tokens")
READY_RULER = "simonjegou/ruler"


def build_examples(
    task: str, tokenizer, n_tokens: int, n_examples: int, seed: int = 0, data_dir: Path | str | None = None
):
    """Examples of a task, sized for a model.

    Parameters
    ----------
    task : str
        One of `TASKS`.
    tokenizer : PreTrainedTokenizerBase
        The model's, with a chat template.
    n_tokens : int
        What an example may take in all: context, question and answer prefix within the chat template, and
        `max_new_tokens`. Haystacks grow until they come close to it.
    n_examples : int
        At least 1. Example i is the same however many there are, so that a run can be extended.
    seed : int, default 0
    data_dir : Path, optional
        Folder with data for the QA and LOFT tasks; default ``VERKV_DATA``, and without it the hub for QA tasks.

    Returns
    -------
    datasets.Dataset
        Columns `COLUMNS`: context, question and answer_prefix (str), answer (list of str), task (str),
        max_new_tokens (int).

    Raises
    ------
    ValueError
        For an unknown task, a tokenizer without chat template, too short a length, missing data, or more examples than
        the data has questions.
    """
    import datasets

    _check_task(task)
    for name, value, least in (("n_tokens", n_tokens, 1), ("n_examples", n_examples, 1), ("seed", seed, 0)):
        check_count(name, value, least)
    make = _maker(task, Prompt.of(tokenizer), n_tokens, seed, data_dir)
    return datasets.Dataset.from_list([asdict(_make(task, make, i, n_tokens)) for i in range(n_examples)])


def _check_task(task: str) -> None:
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}; got {task!r}")


def _maker(task: str, prompt: Prompt, n_tokens: int, seed: int, data_dir) -> Callable[[int], Example]:
    """The function that makes the example with a given index."""
    if task in SYNTHETIC:
        return lambda i: SYNTHETIC[task](task, prompt, n_tokens, f"{task}/{seed}/{i}")
    make = loft_example if task in LOFT_TASKS else question_example
    return lambda i: make(task, prompt, n_tokens, seed, i, data_dir)


def _make(task: str, make: Callable[[int], Example], index: int, n_tokens: int) -> Example:
    try:
        return make(index)
    except TooShort as error:
        raise ValueError(
            f"n_tokens must be at least {error.needed} for example {index} of task {task!r}, got {n_tokens}"
        ) from None


def score(task: str, prediction: str, answers: list[str]) -> float:
    """Score an answer as the task's benchmark does.

    Parameters
    ----------
    task : str
        One of `TASKS`.
    prediction : str
        What the model wrote after the answer prefix.
    answers : list of str
        Column ``answer``, not empty.

    Returns
    -------
    float
        In [0, 1]. RULER: share of the answers that occur in the prediction; QA tasks: whether any does. LOFT: sub-span
        exact match, and for QAMPARI and QUEST its aligned variant, both on the list that the model was asked for.

    Raises
    ------
    ValueError
        For an unknown task or no answers.

    Examples
    --------
    >>> score("niah_multivalue", "They are 12 and 34.", ["12", "34", "56", "78"])
    0.5
    >>> score("loft_nq", "Final Answer: ['The City of Warsaw']", ["Warsaw"])
    1.0
    """
    _check_task(task)
    if not answers:
        raise ValueError("answers must hold at least one answer")
    if task in LOFT_TASKS:
        is_single = task.removeprefix("loft_") in SINGLE
        return (subspan_exact_match if is_single else aligned_subspan_exact_match)(prediction, answers)
    return (string_match_part if task in READER else string_match_all)(prediction, answers)


def source_of(task: str, n_tokens: int, data_dir: Path | str | None = None) -> str:
    """Where a task's questions come from, in words, for reports; loads them."""
    _check_task(task)
    if task in READER:
        return READER[task](data_dir).source
    if task in LOFT_TASKS:
        return find_loft(task.removeprefix("loft_"), n_tokens, data_dir).source
    return "synthetic"


def load_ruler(task: str, n_tokens: int, n_examples: int, name: str = READY_RULER):
    """Ready examples of a RULER task: KVPress' data set on the hub, or a folder in its format.

    Parameters
    ----------
    task : str
    n_tokens : int
        4096, 8192 or 16384 on the hub. They were sized for Llama 3.1's tokenizer.
    n_examples : int
    name : str
        Name on the hub, or a folder with parquet files in a folder per length.

    Returns
    -------
    datasets.Dataset
        Columns as `build_examples`.

    Raises
    ------
    ValueError
        If the data set cannot be loaded, or has fewer examples of the task.
    """
    rows = load(name, data_dir=str(n_tokens), split="test").select_columns(list(COLUMNS))
    found = [i for i, each in enumerate(rows["task"]) if each == task]
    if len(found) < n_examples:
        raise ValueError(f"n_examples must be at most {len(found)} for task {task!r}: {name} has no more")
    return rows.select(found[:n_examples])
