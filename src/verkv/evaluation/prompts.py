"""From a task's examples to token ids, and contexts that several questions share."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """One question of a task.

    Attributes
    ----------
    task : str
    n_tokens : int
        The length that was asked for.
    index : int
        Of the example in its task.
    context, question, answer_prefix : str
    answers : tuple of str
    max_new_tokens : int
    """

    task: str
    n_tokens: int
    index: int
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int

    @property
    def digest(self) -> str:
        """Stands for the text, so that another haystack under the same name is another example."""
        return digest(self.context, self.question, self.answer_prefix, *self.answers)


def digest(*texts: str) -> str:
    """16 hexadecimal digits of a sequence of texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


class PromptEncoder:
    """Token ids of contexts and questions, both inside a user's message, as in KVPress' pipeline.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase

    Raises
    ------
    ValueError
        If the tokenizer has no chat template, or one that is of no use here.
    """

    SEPARATOR = "\n" + "#" * 29  # stands where the context ends; no template has it

    def __init__(self, tokenizer):
        if tokenizer.chat_template is None:
            raise ValueError("the model has no chat template, which the tasks need; use an instruction-tuned model")
        self.tokenizer = tokenizer

    def context(self, text: str) -> Tensor:
        """Template's prefix and context, (1, T)."""
        return self._encode(self._halves(text)[0])

    def question(self, example: Example) -> Tensor:
        """Question, template's suffix, and the beginning of the answer, (1, Q)."""
        return self._encode(example.question + self._halves("context")[1] + example.answer_prefix)

    def prefix_length(self) -> int:
        """Tokens before the context."""
        return self._encode(self._halves("\nX")[0].split("\nX")[0]).shape[1]

    def _halves(self, text: str) -> tuple[str, str]:
        message = [{"role": "user", "content": text + self.SEPARATOR}]
        filled = self.tokenizer.apply_chat_template(
            message, add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        halves = filled.split(self.SEPARATOR)
        if len(halves) != 2:
            raise ValueError("the model's chat template does not give a user's message as it is")
        return halves[0], halves[1]

    def _encode(self, text: str) -> Tensor:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return torch.tensor([ids], dtype=torch.int64)


def read_examples(tasks, task: str, tokenizer, n_tokens: int, n_examples: int, seed: int, data_dir) -> list[Example]:
    """Examples of a task, from the tasks' module.

    Raises
    ------
    ValueError
        What ``build_examples`` refuses: an unknown task, too short a length, a missing data folder.
    """
    rows = tasks.build_examples(task, tokenizer, n_tokens, n_examples, seed=seed, data_dir=data_dir)
    return [
        Example(
            task,
            n_tokens,
            index,
            row["context"],
            row["question"],
            row["answer_prefix"],
            tuple(row["answer"]),
            row["max_new_tokens"],
        )
        for index, row in enumerate(rows)
    ]
