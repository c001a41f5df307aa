"""Long contexts of several kinds, each with a question, built offline and sized with a model's own tokenizer."""

import inspect
import json
import os
import random
from importlib import import_module
from pathlib import Path

from verkv.demo import KEYS, Task, build_task

CODE_MODULES = ("argparse", "ast", "asyncio.base_events", "calendar", "configparser", "difflib", "doctest", "pathlib")
CODE_MODULES += ("inspect", "logging", "mailbox", "optparse", "pdb", "pickle", "subprocess", "tarfile", "typing")
# fmt: off
ADJECTIVES = (
    "amber", "bold", "calm", "dusty", "eager", "faint", "golden", "hollow", "ivory", "jolly",
    "keen", "lucid", "mellow", "noble", "olive", "pale", "quiet", "rusty", "silver", "tidy",
)
NOUNS = (
    "anchor", "basin", "candle", "desert", "engine", "falcon", "garden", "hammer", "island", "jacket",
    "kettle", "lantern", "meadow", "needle", "orchid", "pepper", "quarry", "ribbon", "saddle", "tunnel",
)
# fmt: on


def build_context(kind: str, tokenizer, n_tokens: int, seed: int) -> Task:
    """A context of about ``n_tokens`` tokens and a question about it.

    Parameters
    ----------
    kind : {"prose", "code", "records", "questions"}
        English prose with three needles; Python source of the standard library with a needle in a comment; many lines
        that look like the one asked for; paragraphs of XQuAD with one of its questions (needs ``VERKV_DATA``).
    tokenizer : PreTrainedTokenizerBase
    n_tokens, seed : int

    Raises
    ------
    ValueError
        For an unknown kind, or "questions" without data.
    """
    if kind == "prose":
        return build_task(tokenizer, n_tokens, seed)
    builders = {"code": _code, "records": _records, "questions": _questions}
    if kind not in builders:
        raise ValueError(f"kind must be one of {['prose', *builders]}, got {kind!r}")
    pieces, question, prefix, answer = builders[kind](random.Random(seed))
    return Task(_fill(tokenizer, pieces, n_tokens), question, prefix, answer)


def _fill(tokenizer, pieces: list[str], n_tokens: int) -> str:
    """The first ``n_tokens`` tokens of the pieces. A needle must be among the early ones."""
    text = ""
    for piece in pieces:
        text += piece
        if len(text) > 8 * n_tokens:  # no tokenizer here makes tokens of more than eight characters on average
            break
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:n_tokens])


def _code(rng: random.Random) -> tuple[list[str], str, str, str]:
    key, number = rng.choice(KEYS), str(rng.randint(10_000, 99_999))
    names = rng.sample(CODE_MODULES, len(CODE_MODULES))
    lines = [line + "\n" for name in names for line in inspect.getsource(import_module(name)).splitlines()]
    start = rng.randrange(200)
    lines = lines[start:]
    lines.insert(rng.randrange(50, 200), f"# The magic number for {key} is {number}.\n")
    return lines, f"\nWhat is the magic number for {key}?", f" The magic number for {key} is", number


def _records(rng: random.Random) -> tuple[list[str], str, str, str]:
    names = [f"{a}-{n}" for a in ADJECTIVES for n in NOUNS]
    rng.shuffle(names)
    numbers = {name: str(rng.randint(10_000, 99_999)) for name in names}
    lines = [f"The code of {name} is {number}.\n" for name, number in numbers.items()]
    wanted = names[rng.randrange(100)]
    return lines, f"\nWhat is the code of {wanted}?", f" The code of {wanted} is", numbers[wanted]


def _questions(rng: random.Random) -> tuple[list[str], str, str, str]:
    folder = os.environ.get("VERKV_DATA")
    path = Path(folder or ".") / "xquad.en.json"
    if not folder or not path.is_file():
        raise ValueError("kind 'questions' needs xquad.en.json in the folder that VERKV_DATA names")
    articles = json.loads(path.read_text(encoding="utf-8"))["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    rng.shuffle(paragraphs)
    asked = rng.choice(paragraphs[rng.randrange(8)]["qas"])
    pieces = [paragraph["context"] + "\n\n" for paragraph in paragraphs]
    return pieces, f"\n{asked['question']}", " The answer is", asked["answers"][0]["text"]
