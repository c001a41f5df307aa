"""One example of a task, how many tokens its prompt takes, and how a haystack is sized to a number of tokens."""

from collections.abc import Callable
from dataclasses import dataclass

SEPARATOR = "#" * 40  # as in KVPress' pipeline: marks where the context ends inside the user's message


class TooShort(ValueError):
    """The least prompt of a task does not fit; ``needed`` is its length in tokens."""

    def __init__(self, needed: int):
        super().__init__(f"the shortest prompt takes {needed} tokens")
        self.needed = needed


@dataclass(frozen=True)
class Example:
    """A row of a data set, with the columns that KVPress' evaluation expects.

    Attributes
    ----------
    context, question, answer_prefix : str
        In the prompt's order. Between question and prefix stands the chat template's switch to the assistant.
    answer : list of str
        What the score looks for.
    task : str
    max_new_tokens : int
        Room for the answer, in tokens.
    """

    context: str
    question: str
    answer_prefix: str
    answer: list[str]
    task: str
    max_new_tokens: int


@dataclass(frozen=True)
class Prompt:
    """A tokenizer and what its chat template puts around the user's message.

    Attributes
    ----------
    tokenizer : PreTrainedTokenizerBase
    before, after : str
        The template's text before the context, and from the question's end to the answer's beginning.
    """

    tokenizer: object
    before: str
    after: str

    @classmethod
    def of(cls, tokenizer) -> "Prompt":
        """Split the tokenizer's chat template where the user's message stands.

        Raises
        ------
        ValueError
            If the tokenizer has no chat template.
        """
        if getattr(tokenizer, "chat_template", None) is None:
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise ValueError(f"tokenizer {name!r} has no chat template: choose an instruction-tuned model")
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": SEPARATOR}], add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        return cls(tokenizer, *text.split(SEPARATOR))

    def count(self, example: Example) -> int:
        """Tokens of the whole prompt and of the longest answer, counted in the two pieces that KVPress encodes."""
        pieces = (self.before + example.context, example.question + self.after + example.answer_prefix)
        n_prompt = sum(len(self.tokenizer.encode(piece, add_special_tokens=False)) for piece in pieces)
        return n_prompt + example.max_new_tokens


def largest_fitting(
    render: Callable[[int], Example],
    count: Callable[[Example], int],
    limit: int,
    least: int,
    most: int,
    slack: float = 0.005,
) -> Example:
    """Grow a haystack until the next unit would not fit.

    Parameters
    ----------
    render : callable
        The example with so many units of haystack. Its length grows about linearly with them.
    count : callable
        Tokens of an example.
    limit : int
        Tokens that the result may take.
    least, most : int
        Units of haystack, least <= most.
    slack : float
        Stop once fewer tokens than this share of `limit`, or than one unit takes, are left. Each trial encodes the
        whole prompt, which at 128,000 tokens takes a good part of a second.

    Returns
    -------
    Example

    Raises
    ------
    TooShort
        If not even `least` units fit.
    """
    best = render(least)
    used = count(best)
    if used > limit:
        raise TooShort(used)
    low, high, per_unit = least, most + 1, None
    while high - low > 1:
        step = 16 if per_unit is None else int((limit - used) / per_unit)
        if step < 1 or (per_unit is not None and limit - used < slack * limit):
            break
        trial = min(low + step, high - 1)
        example = render(trial)
        n_tokens = count(example)
        per_unit = max((n_tokens - used) / (trial - low), 0.1)
        if n_tokens > limit:
            high = trial
        else:
            low, best, used = trial, example, n_tokens
    return best
