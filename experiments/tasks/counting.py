"""RULER's two aggregation tasks: the ten words repeated most often in a list, the three most frequent coded words."""

import math
import random
import string
from dataclasses import dataclass

from .prompt import Example, Prompt, largest_fitting
from .words import compounds, distinct_words, new_ones, single_words

N_COMMON = 10
COMMON_INSTRUCTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often."
)
COMMON_QUESTION = f"Question: What are the {N_COMMON} most common words in the above list?"
COMMON_PREFIX = f"Answer: The top {N_COMMON} words that appear most often in the list are:"
COMMON_NEW_TOKENS = 120

CODED_INSTRUCTION = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. "
)
CODED_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?"
)
CODED_PREFIX = "Answer: According to the coded text above, the three most frequently appeared words are:"
CODED_NEW_TOKENS = 50
ALPHA, ZETA = 2.0, math.pi**2 / 6  # of the zeta distribution; ZETA = zeta(ALPHA)
LEAST_CODED = 53  # draws from which on the third coded word always appears more often than the fourth


@dataclass(frozen=True)
class Repeats:
    """How often a list repeats its common and its other words, and the words of the solved example before it."""

    common: int
    other: int
    example_words: int
    example_common: int
    example_other: int


SHORT, LONG = Repeats(6, 1, 20, 3, 1), Repeats(30, 3, 40, 10, 3)  # below 4,096 tokens, and from there on


def common_words_example(name: str, prompt: Prompt, n_tokens: int, seed: str) -> Example:
    """An example that takes at most `n_tokens` tokens; TooShort if there is none."""
    repeats = SHORT if n_tokens < 4096 else LONG
    most = len(single_words()) + len(compounds()) - N_COMMON - repeats.example_words
    return largest_fitting(
        lambda n: _common_words(name, n, repeats, random.Random(seed)), prompt.count, n_tokens, 1, most
    )


def _common_words(name: str, n_other: int, repeats: Repeats, rng: random.Random) -> Example:
    words = distinct_words(rng, N_COMMON + n_other + repeats.example_words)
    shown, words = words[: repeats.example_words], words[repeats.example_words :]
    solved = _numbered_list(shown, repeats.example_common, repeats.example_other, rng)
    solved += f"{COMMON_QUESTION} {COMMON_PREFIX} {_numbered(shown[:N_COMMON])}\n"
    text = _numbered_list(words, repeats.common, repeats.other, rng)
    return Example(solved + text, COMMON_QUESTION, COMMON_PREFIX, words[:N_COMMON], name, COMMON_NEW_TOKENS)


def _numbered_list(words: list[str], n_common: int, n_other: int, rng: random.Random) -> str:
    """The instruction and the list: its first ten words `n_common` times each, the others `n_other` times."""
    listed = words[:N_COMMON] * n_common + words[N_COMMON:] * n_other
    rng.shuffle(listed)
    return f"{COMMON_INSTRUCTION}\n{_numbered(listed)}\n"


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


def coded_words_example(name: str, prompt: Prompt, n_tokens: int, seed: str) -> Example:
    """An example that takes at most `n_tokens` tokens; TooShort if there is none."""
    most = max(LEAST_CODED, n_tokens)
    return largest_fitting(
        lambda n: _coded_words(name, n, n_tokens // 50, random.Random(seed)),
        prompt.count,
        n_tokens,
        LEAST_CODED,
        most,
    )


def _coded_words(name: str, n_draws: int, n_distinct: int, rng: random.Random) -> Example:
    """The word of rank k appears floor(n_draws k^-2 / zeta(2)) times; dots stand for the most frequent one."""

    def draw_word(rng: random.Random) -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=6))

    words = ["...", *new_ones(draw_word, rng, max(n_distinct, 5) - 1, set())]
    text = [word for k, word in enumerate(words, start=1) for _ in range(int(n_draws * k**-ALPHA / ZETA))]
    rng.shuffle(text)
    context = CODED_INSTRUCTION + " ".join(text) + "\n"
    return Example(context, CODED_QUESTION, CODED_PREFIX, words[1:4], name, CODED_NEW_TOKENS)
