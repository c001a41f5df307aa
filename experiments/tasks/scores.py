"""How answers are scored: RULER's string match, LOFT's sub-span exact match."""

import ast
import re
import string
import unicodedata

CONTROL = re.compile(r"[\x00-\x1f]")


def string_match_all(prediction: str, answers: list[str]) -> float:
    """Share of the answers that occur in the prediction, upper or lower case: RULER's score of all but QA tasks.

    Parameters
    ----------
    prediction : str
    answers : list of str
        Not empty.

    Returns
    -------
    float
        In [0, 1].
    """
    text = _clean(prediction)
    return sum(answer.lower() in text for answer in answers) / len(answers)


def string_match_part(prediction: str, answers: list[str]) -> float:
    """1 if any of the answers occurs in the prediction, upper or lower case, else 0: RULER's score of QA tasks."""
    text = _clean(prediction)
    return float(any(answer.lower() in text for answer in answers))


def _clean(prediction: str) -> str:
    """In lower case, with line breaks for control characters. (KVPress' scorer deletes them, which joins lines.)"""
    return CONTROL.sub("\n", prediction.strip()).strip().lower()


def subspan_exact_match(prediction: str, answers: list[str]) -> float:
    """1 if an answer lies in the first item of the prediction's list, both normalised, else 0: LOFT, one answer.

    Parameters
    ----------
    prediction : str
        What the model wrote. The first line with ``[...]`` is its answer; without one the score is 0.
    answers : list of str
        Alternatives, any of which will do.

    Returns
    -------
    float
        0 or 1.
    """
    items = listed_items(prediction)
    if not items:
        return 0.0
    first = normalise(items[0])
    return float(any(answer in first for answer in map(normalise, answers) if answer))


def aligned_subspan_exact_match(prediction: str, answers: list[str]) -> float:
    """1 if every answer has an item of the prediction's list of its own, one within the other, else 0: LOFT, several.

    Parameters
    ----------
    prediction : str
    answers : list of str
        All are wanted.

    Returns
    -------
    float
        0 or 1.

    Notes
    -----
    LOFT's program aligns answers and items with the assignment of most matches and asks whether all answers have one;
    that is whether a matching covers the answers. What normalises to nothing matches nothing here: there, an item
    ``""`` lies within every answer.
    """
    wanted = [normalise(answer) for answer in answers]
    items = [normalise(item) for item in listed_items(prediction)]
    partners = [[j for j, item in enumerate(items) if _overlap(answer, item)] for answer in wanted]
    return float(_covers_all(partners))


def _overlap(answer: str, item: str) -> bool:
    return bool(answer and item) and (answer in item or item in answer)


def _covers_all(partners: list[list[int]]) -> bool:
    """Is there a matching that gives every row one of its partners? (Augmenting paths.)"""
    owner: dict[int, int] = {}

    def place(row: int, seen: set[int]) -> bool:
        for column in partners[row]:
            if column in seen:
                continue
            seen.add(column)
            if column not in owner or place(owner[column], seen):
                owner[column] = row
                return True
        return False

    return all(place(row, set()) for row in range(len(partners)))


def normalise(text: str) -> str:
    """Canonical decomposition, lower case, no punctuation (ASCII), no English articles, single spaces; as SQuAD's."""
    text = unicodedata.normalize("NFD", text).lower()
    text = text.translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def listed_items(prediction: str) -> list[str]:
    """The items of the first line that holds ``[...]``, as strings; none where that is not a list of Python's.

    Asterisks and backquotes go first (models like bold face), and an apostrophe between letters is no quotation mark.
    """
    lines = prediction.replace("*", "").replace("`", "").strip().split("\n")
    line = next((line for line in lines if "[" in line and "]" in line), "")
    literal = line[line.find("[") : line.rfind("]") + 1]
    literal = re.sub(r"(?<=[a-zA-Z0-9])'(?=[a-zA-Z0-9])", r"\\'", literal)
    try:
        items = ast.literal_eval(literal)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return [str(item) for item in items] if isinstance(items, list | tuple) else []
