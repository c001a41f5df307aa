"""A tiny model on disk with a tokenizer of characters, and tasks of a few lines, for the tests of the evaluation."""

import string
from pathlib import Path
from types import SimpleNamespace

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTEXT_CHARACTERS = 120


def character_tokenizer(chat_template: str | None = TEMPLATE):
    """One token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = sorted(set(string.printable) - set("\r\x0b\x0c\t"))
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "?unknown", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?unknown"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template)


def save_model(model, folder: Path, chat_template: str | None = TEMPLATE) -> str:
    """The folder's name, for ``--model``."""
    model.save_pretrained(folder)
    character_tokenizer(chat_template).save_pretrained(folder)
    return str(folder)


def _rows(task: str, n_examples: int, seed: int) -> list[dict]:
    rows = []
    for i in range(n_examples):
        topic = 0 if task == "shared" else i
        words = [f"{task} {seed}-{topic}-{k} is {(7 * k + 3 * topic) % 10}." for k in range(20)]
        rows.append(
            {
                "context": " ".join(words)[:CONTEXT_CHARACTERS],
                "question": f"\nWhat is number {i}?",
                "answer_prefix": "It is",
                "answer": [str(i), "e"],
                "task": task,
                "max_new_tokens": 30,
            }
        )
    return rows


def _build_examples(task, tokenizer, n_tokens, n_examples, seed=0, data_dir=None):
    if n_tokens < CONTEXT_CHARACTERS:
        raise ValueError(f"n_tokens={n_tokens} is too short for task {task}")
    if task == "needs_data" and data_dir is None:
        raise ValueError("task needs_data needs a folder with its data; give --data-dir or set VERKV_DATA")
    return _rows(task, n_examples, seed)


def _score(task, prediction, answers):
    return sum(answer in prediction for answer in answers) / len(answers)


# In place of ``verkv.evaluation.tasks``. All questions of "shared" are about one context.
TASKS = SimpleNamespace(
    TASKS=("own", "shared", "needs_data"), build_examples=_build_examples, score=_score, __name__="tiny tasks"
)
