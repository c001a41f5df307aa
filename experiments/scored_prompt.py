"""A model with a prefilled and scored prompt of a task, for scripts that measure on the spot."""

import argparse
from dataclasses import dataclass

import torch
from paper_items import parser

MODELS = {"laptop": None, "paper": "Qwen/Qwen3-4B-Instruct-2507"}
LENGTHS = {"laptop": 3000, "paper": 32768}
N_PROTECTED = {"laptop": 8, "paper": 64}  # sinks, and local tokens
SHORTLISTS = {"laptop": 32, "paper": 128}


@dataclass(frozen=True)
class ScoredPrompt:
    """What measurements start from.

    Attributes
    ----------
    model, tokenizer
    name : str
        Of the model.
    scored : verkv.evaluation.prefix.ScoredContext
    source : tuple
        Which of its scores.
    context_ids, question_ids : Tensor, shape (1, T), int64
    """

    model: object
    tokenizer: object
    name: str
    scored: object
    source: tuple[str, str | None]
    context_ids: torch.Tensor
    question_ids: torch.Tensor


def prompt_parser(description: str, output: str) -> argparse.ArgumentParser:
    """Options of scripts that measure on one prompt."""
    made = parser(description, output)
    made.add_argument("--model", help="name or folder (default: the preset's)")
    made.add_argument("--tokens", type=int, help="length of the prompt (default: the preset's)")
    made.add_argument("--scores", choices=("kvzip", "fastkvzip"), default="kvzip", help="(default: kvzip)")
    made.add_argument("--device", help="cpu, cuda, ... (default: a GPU where there is one)")
    made.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    made.add_argument("--seed", type=int, default=0, help="of the prompt, the draws and the order of measurements")
    return made


def load_prompt(options: argparse.Namespace, task: str = "cwe") -> ScoredPrompt:
    """Load the model, build an example of a task, prefill and score it.

    Parameters
    ----------
    options : argparse.Namespace
        Of :func:`prompt_parser`.
    task : str

    Raises
    ------
    ValueError
        If the model or the length cannot be used.
    """
    from verkv.evaluation.loading import Share, find_model, load_model
    from verkv.evaluation.plan import load_tasks
    from verkv.evaluation.prefix import score_context
    from verkv.evaluation.prompts import PromptEncoder, read_examples
    from verkv.evaluation.settings import EvalSettings

    torch.set_num_threads(options.threads)
    found = find_model(options.model or MODELS[options.preset])
    n_tokens = options.tokens or LENGTHS[options.preset]
    if found.window is not None and n_tokens > found.window:
        raise ValueError(f"--tokens {n_tokens} is too long: {found.name} takes {found.window} tokens")
    example = read_examples(load_tasks(), task, found.tokenizer, n_tokens, 1, options.seed, None)[0]
    encoder = PromptEncoder(found.tokenizer)
    settings = EvalSettings((), device=options.device, dtype="bfloat16" if options.preset == "paper" else None)
    model = load_model(found, settings, Share())
    context_ids = encoder.context(example.context).to(model.device)
    key = (options.scores, None)
    scored = score_context(model, found.tokenizer, context_ids, [key])
    question_ids = encoder.question(example).to(model.device)
    return ScoredPrompt(model, found.tokenizer, found.name, scored, key, context_ids, question_ids)


def verkv_press(options: argparse.Namespace, epsilon: float, delta: float):
    """VerKV as in the paper, at 16x, with sinks, window and shortlist scaled to the preset's length."""
    from verkv import KVzipPress, VerKVPress

    ends = N_PROTECTED[options.preset]
    return VerKVPress(
        KVzipPress(),
        compression_ratio=0.9375,
        epsilon=epsilon,
        delta=delta,
        paper=True,
        shortlist=SHORTLISTS[options.preset],
        n_sink=ends,
        n_local=ends,
        seed=options.seed,
    )
