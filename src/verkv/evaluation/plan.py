"""What a run consists of: contexts, and what is run on each. All of it is checked before anything runs."""

import functools
import importlib
import itertools
from dataclasses import dataclass

import torch

from verkv.estimators.sampling import MIN_INCLUSION_PROB
from verkv.evaluation.loading import ModelSource, Share, choose_device, dtype_of
from verkv.evaluation.methods import Protection, Setting, describe, make_press
from verkv.evaluation.prompts import Example, PromptEncoder, digest, read_examples
from verkv.evaluation.results import answer_id
from verkv.evaluation.settings import EvalSettings
from verkv.presses.budget import LayerGeometry, token_budget


@dataclass(frozen=True)
class Job:
    """One answer.

    Attributes
    ----------
    id : str
    setting : Setting
    example : Example
    facts : dict
        What defines the answer; the first fields of its line.
    """

    id: str
    setting: Setting
    example: Example
    facts: dict


@dataclass(frozen=True)
class ContextPlan:
    """A context with everything that is run on it, in order.

    Attributes
    ----------
    context : str
    protection : Protection
    jobs : tuple of Job
    """

    context: str
    protection: Protection
    jobs: tuple[Job, ...]

    @property
    def draw_salt(self) -> str:
        """Makes draws of different contexts independent."""
        return digest(self.context)


@dataclass(frozen=True)
class Sizes:
    """Tokens of a context, with the template's prefix, and of that prefix alone."""

    context: int
    template: int


def load_tasks():
    """The tasks' module.

    Raises
    ------
    ValueError
        If it is not installed.
    """
    try:
        return importlib.import_module("verkv.evaluation.tasks")
    except ModuleNotFoundError as error:
        raise ValueError(f"the tasks cannot be loaded: {error}; pip install 'verkv[demo]'") from error


def draw_seed(seed: int | None, salt: str) -> int:
    """Seed of a context's draw: the same for all methods and rates, another for every context."""
    return int(digest(str(seed), salt), 16) >> 1


def plan_model(settings: EvalSettings, source: ModelSource, tasks, share: Share) -> list[ContextPlan]:
    """All contexts for a model, first examples first, so that an unfinished run has some of every task.

    Raises
    ------
    ValueError
        For whatever cannot run: a prompt longer than the model's window, no chat template, tasks' own refusals,
        an impossible budget, a method that needs another device.
    """
    encoder = PromptEncoder(source.tokenizer)
    longest = max(n_tokens for grid in settings.grids for n_tokens in grid.n_tokens)
    if source.window is not None and longest > source.window:
        raise ValueError(f"n_tokens={longest} is too long: {source.name} takes {source.window} tokens")
    plans = [
        ContextPlan(context, protection_of(settings, n_tokens), tuple(jobs.values()))
        for (n_tokens, _, context), jobs in collect_jobs(settings, source, tasks).items()
    ]
    plans.sort(key=lambda plan: (plan.jobs[0].example.n_tokens, plan.jobs[0].example.index))  # stable: tasks in order
    for plan in plans:
        check_plan(plan, settings, source, encoder, share)
    return plans


def collect_jobs(settings: EvalSettings, source: ModelSource, tasks) -> dict[tuple[int, str, str], dict[str, Job]]:
    """Jobs by length, task and context, then by id: what several grids ask for is there once."""
    found: dict[tuple[int, str, str], dict[str, Job]] = {}

    @functools.cache
    def examples_of(task: str, n_tokens: int, n_examples: int) -> list[Example]:
        arguments = tasks, task, source.tokenizer, n_tokens, n_examples, settings.data_seed, settings.data_dir
        return read_examples(*arguments)

    for grid in settings.grids:
        for n_tokens, task in itertools.product(grid.n_tokens, grid.tasks):
            for example in examples_of(task, n_tokens, grid.n_examples):
                jobs = found.setdefault((n_tokens, task, example.context), {})
                for setting in grid.settings():
                    job = make_job(settings, source, setting, example)
                    jobs.setdefault(job.id, job)
    return found


def protection_of(settings: EvalSettings, n_tokens: int) -> Protection:
    """Sinks and window at a length."""
    return Protection.scaled(n_tokens, settings.n_sink, settings.n_local)


def make_job(settings: EvalSettings, source: ModelSource, setting: Setting, example: Example) -> Job:
    """The job of an example under a setting."""
    press = make_press(setting, protection_of(settings, example.n_tokens))
    limits = [n for n in (settings.max_new_tokens, example.max_new_tokens) if n is not None]
    facts = {
        "model": source.name,
        "task": example.task,
        "n_tokens": example.n_tokens,
        "example": example.index,
        "data_seed": settings.data_seed,
        "seed": setting.seed,
        **describe(setting, press),
        "max_new_tokens": min(limits),
        "prompt": example.digest,
    }
    defining = {name: value for name, value in facts.items() if name != "label"}
    defining |= {"audit": settings.audit, "dtype": str(dtype_of(settings.dtype, source.config))}
    return Job(answer_id(defining), setting, example, facts)


def check_plan(
    plan: ContextPlan, settings: EvalSettings, source: ModelSource, encoder: PromptEncoder, share: Share
) -> None:
    """Raise ValueError if a context's work cannot be done."""
    names = {job.setting.method.name for job in plan.jobs}
    if "dense_offloaded" in names and choose_device(settings.device, share).type != "cuda":
        raise ValueError("method dense_offloaded moves the cache over the bus and needs a CUDA device")
    sizes = Sizes(encoder.context(plan.context).shape[1], encoder.prefix_length())
    for example in dict.fromkeys(job.example for job in plan.jobs):
        n_answer = max(job.facts["max_new_tokens"] for job in plan.jobs)
        n_total = sizes.context + encoder.question(example).shape[1] + n_answer
        if source.window is not None and n_total > source.window:
            raise ValueError(
                f"task {example.task}: example {example.index} has {n_total} tokens with its answer, but {source.name} "
                f"takes {source.window}; use a smaller n_tokens"
            )
    for setting in {repr(job.setting): job.setting for job in plan.jobs}.values():
        check_budget(setting, plan, source, dtype_of(settings.dtype, source.config), sizes)


def check_budget(setting: Setting, plan: ContextPlan, source: ModelSource, dtype: torch.dtype, sizes: Sizes) -> None:
    """Raise ValueError if a sample of ours would not fit its budget; says which parts do not."""
    if "seed" not in setting.method.known.axes or setting.compression == 1.0:
        return
    press = make_press(setting, plan.protection)
    text = source.config.get_text_config(decoder=True)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    template = sizes.template if setting.method.known.source == "kvzip" else 0  # gates score the template, too
    n_protected = min(sizes.context, sum(press._n_protected_ends(sizes.context, template)))
    try:
        token_budget(
            torch.tensor([sizes.context]),
            torch.tensor([n_protected]),
            press.compression_ratio,
            LayerGeometry(text.num_key_value_heads, head_dim, head_dim, dtype.itemsize),
            press._sketch(source),  # of a model it needs the configuration only
            press._bytes_per_token(),
            MIN_INCLUSION_PROB,
        )
    except ValueError as error:
        raise ValueError(f"method {setting.method.name} at {setting.compression:g}x: {error}") from error
