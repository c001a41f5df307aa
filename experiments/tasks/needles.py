"""RULER's eight needle tasks: values of keys, hidden in noise, in prose or among other needles."""

import random
from dataclasses import dataclass

from .prompt import Example, Prompt, largest_fitting
from .words import NOISE, new_ones, prose, prose_words, random_number, random_uuid, random_word

NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
MAX_NEW_TOKENS = 128
DRAW = {"word": random_word, "number": random_number, "uuid": random_uuid}
N_DEPTHS = 40  # in prose a needle lies at one of so many depths, from 0 to 100 %


@dataclass(frozen=True)
class NeedleTask:
    """What sets one needle task apart.

    Attributes
    ----------
    haystack : {"noise", "prose", "needles"}
    key, value : {"word", "number", "uuid"}
    n_keys, n_values, n_queries : int
        Keys in the haystack, values of each, keys asked for.
    """

    haystack: str
    key: str = "word"
    value: str = "number"
    n_keys: int = 1
    n_values: int = 1
    n_queries: int = 1


NEEDLE_TASKS = {
    "niah_single_1": NeedleTask("noise"),
    "niah_single_2": NeedleTask("prose"),
    "niah_single_3": NeedleTask("prose", value="uuid"),
    "niah_multikey_1": NeedleTask("prose", n_keys=4),
    "niah_multikey_2": NeedleTask("needles"),
    "niah_multikey_3": NeedleTask("needles", key="uuid", value="uuid"),
    "niah_multivalue": NeedleTask("prose", n_values=4),
    "niah_multiquery": NeedleTask("prose", n_keys=4, n_queries=4),
}


def needle_example(name: str, prompt: Prompt, n_tokens: int, seed: str) -> Example:
    """An example of the needle task `name` that takes at most `n_tokens` tokens; TooShort if there is none."""
    task = NEEDLE_TASKS[name]
    least = task.n_keys * task.n_values
    if task.haystack == "prose":
        least, most = 40 * least, n_tokens  # a word is at least a token, and needles want a sentence between them
    else:
        most = max(least, n_tokens)
    return largest_fitting(lambda n: _render(name, task, n, random.Random(seed)), prompt.count, n_tokens, least, most)


def _render(name: str, task: NeedleTask, n_units: int, rng: random.Random) -> Example:
    taken: set[str] = set()
    keys = new_ones(DRAW[task.key], rng, task.n_keys, taken)
    values = {key: new_ones(DRAW[task.value], rng, task.n_values, taken) for key in keys}
    needles = [NEEDLE.format(kind=task.value, key=key, value=value) for key in keys for value in values[key]]
    rng.shuffle(needles)
    asked = rng.sample(keys, task.n_queries)
    answers = [value for key in asked for value in values[key]]
    haystack = {"noise": _in_noise, "prose": _in_prose, "needles": _among_needles}[task.haystack]
    return _ask(name, task.value, haystack(needles, n_units, task, taken, rng), asked, answers)


def _in_noise(needles: list[str], n_units: int, task: NeedleTask, taken: set[str], rng: random.Random) -> str:
    return _insert_lines(needles, [NOISE] * n_units, rng)


def _among_needles(needles: list[str], n_units: int, task: NeedleTask, taken: set[str], rng: random.Random) -> str:
    """Distractors may repeat one another, as in RULER, but no key that is asked for: its answer must be unique."""
    lines = []
    for _ in range(n_units):
        (key,) = new_ones(DRAW[task.key], rng, 1, set(taken))
        lines.append(NEEDLE.format(kind=task.value, key=key, value=DRAW[task.value](rng)))
    return _insert_lines(needles, lines, rng)


def _insert_lines(needles: list[str], lines: list[str], rng: random.Random) -> str:
    places = sorted(rng.sample(range(len(lines) + len(needles)), len(needles)))
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines)


def _in_prose(needles: list[str], n_units: int, task: NeedleTask, taken: set[str], rng: random.Random) -> str:
    start = rng.randrange(len(prose_words()))
    depths = sorted(rng.sample(range(N_DEPTHS), len(needles)))
    sentences = prose(n_units, start)
    places = [round(depth / (N_DEPTHS - 1) * len(sentences)) for depth in depths]
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        sentences.insert(place, needle)
    return " ".join(sentences)


def _ask(name: str, kind: str, haystack: str, keys: list[str], answers: list[str]) -> Example:
    query = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + ", and " + keys[-1]
    if len(answers) == 1:
        some, is_are, what_are = f"A special magic {kind} is", "is", "What is"
    else:
        kind += "s"
        some, is_are, what_are = f"Some special magic {kind} are", "are", "What are all"
    return Example(
        context=f"{some} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards.\n{haystack}\n",
        question=f"{what_are} the special magic {kind} for {query} mentioned in the provided text?",
        answer_prefix=f"The special magic {kind} for {query} mentioned in the provided text {is_are}",
        answer=answers,
        task=name,
        max_new_tokens=MAX_NEW_TOKENS,
    )
