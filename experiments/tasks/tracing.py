"""RULER's variable tracking: a chain of assignments hidden in noise, after one solved example."""

import itertools
import random
import string

from .prompt import Example, Prompt, largest_fitting
from .words import NOISE, new_ones

N_HOPS = 4
MAX_NEW_TOKENS = 30
EXAMPLE_LINES = 10  # of noise in the solved example, which is about 400 tokens long
INSTRUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text."
QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
# RULER's own prefix misspells "assigned".
PREFIX = (
    "Answer: According to the chain(s) of variable assignment in the text above, {n} variables are assigned the value "
    "{value}, they are: "
)


def tracking_example(name: str, prompt: Prompt, n_tokens: int, seed: str) -> Example:
    """An example that takes at most `n_tokens` tokens; TooShort if there is none."""
    least = N_HOPS + 2
    return largest_fitting(
        lambda n: _render(name, n, random.Random(seed)), prompt.count, n_tokens, least, max(least, n_tokens)
    )


def _render(name: str, n_lines: int, rng: random.Random) -> Example:
    shown, shown_value, shown_names = _hidden_chain(EXAMPLE_LINES, 3, rng)
    solved = f"{shown}{_question(shown_value)} {_prefix(shown_value)}{' '.join(shown_names)}\n\n"
    text, value, names = _hidden_chain(n_lines, 5, rng)
    return Example(solved + text, _question(value), _prefix(value), names, name, MAX_NEW_TOKENS)


def _hidden_chain(n_lines: int, name_length: int, rng: random.Random) -> tuple[str, str, list[str]]:
    """Instruction and noise with a chain in its order; the chain's value; its variables."""

    def draw_name(rng: random.Random) -> str:
        return "".join(rng.choices(string.ascii_uppercase, k=name_length))

    value, names = str(rng.randint(10_000, 99_999)), new_ones(draw_name, rng, N_HOPS + 1, set())
    steps = [f"VAR {names[0]} = {value}"]
    steps += [f"VAR {name} = VAR {source}" for source, name in itertools.pairwise(names)]
    lines = [NOISE] * n_lines
    for place, step in zip(sorted(rng.sample(range(n_lines), len(steps))), steps, strict=True):
        lines[place] = f"{step} {lines[place]}"
    return f"{INSTRUCTION}\n\n" + "\n".join(lines) + "\n", value, names


def _question(value: str) -> str:
    return QUESTION.format(value=value)


def _prefix(value: str) -> str:
    return PREFIX.format(n=N_HOPS + 1, value=value)
