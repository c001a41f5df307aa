"""Runs plans: each context is prefilled and scored once, and every setting and question starts from that."""

import platform
from collections.abc import Callable, Iterator
from importlib import metadata

from tqdm import tqdm

from verkv import __version__
from verkv.evaluation.decoding import Question, Reference
from verkv.evaluation.loading import Share, find_model, load_model
from verkv.evaluation.methods import Method, Setting, make_press
from verkv.evaluation.plan import ContextPlan, Job, draw_seed, load_tasks, plan_model
from verkv.evaluation.prefix import ScoredContext, forget_masks, score_context
from verkv.evaluation.prompts import Example, PromptEncoder
from verkv.evaluation.results import ResultsFile
from verkv.evaluation.settings import EvalSettings
from verkv.evaluation.trial import Outcome, open_trial

QUESTIONS_AT_ONCE = 16  # of one context, whose dense next-token distributions are kept together
DENSE = Setting(Method("dense"), 1.0)


class EvaluationError(RuntimeError):
    """A method failed on a context."""


def run_eval(settings: EvalSettings, share: Share | None = None) -> int:
    """Run everything that the results file does not hold yet.

    Parameters
    ----------
    settings : EvalSettings
    share : Share, optional
        This process' part of the contexts; by default as the environment says.

    Returns
    -------
    int
        How many answers were added.

    Raises
    ------
    ValueError
        If something cannot run; nothing has been written then.
    EvaluationError
        If a method fails later. What was written before stays.
    """
    share = share or Share.from_environment()
    results, tasks = ResultsFile(settings.output), load_tasks()
    work = []
    for name in settings.models:
        source = find_model(name)
        plans = plan_model(settings, source, tasks, share)
        work.append((source, [plan for i, plan in enumerate(plans) if share.takes(i)]))
    n_missing = sum(job.id not in results.ids for _, plans in work for plan in plans for job in plan.jobs)
    n_written = 0
    with tqdm(total=n_missing, unit="answer", dynamic_ncols=True, disable=None) as bar:  # None: only on a terminal
        for source, plans in work:
            plans = [plan for plan in plans if any(job.id not in results.ids for job in plan.jobs)]
            if not plans:
                continue
            run = ModelRun(load_model(source, settings, share), source.tokenizer, settings, tasks.score)
            for plan in plans:
                bar.set_description(f"{plan.jobs[0].example.task} {plan.jobs[0].example.index}")
                for line in run.lines(plan, results.ids):
                    n_written += results.append(line)
                    bar.update()
    return n_written


class ModelRun:
    """A loaded model, answering.

    Parameters
    ----------
    model, tokenizer
    settings : EvalSettings
    score : callable
        ``(task, prediction, answers) -> float``.
    """

    def __init__(self, model, tokenizer, settings: EvalSettings, score: Callable[[str, str, list[str]], float]):
        self.model, self.tokenizer, self.settings, self.score = model, tokenizer, settings, score
        self.encoder = PromptEncoder(tokenizer)
        stop = model.generation_config.eos_token_id
        self.stop_ids = frozenset(stop if isinstance(stop, list) else [] if stop is None else [stop])
        self.environment = {
            "versions": versions(),
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
        }

    def lines(self, plan: ContextPlan, done: set[str]) -> Iterator[dict]:
        """Result lines of a context, in the plan's order, without those that are done.

        Raises
        ------
        EvaluationError
            If a method fails.
        """
        jobs = [job for job in plan.jobs if job.id not in done]
        context_ids = self.encoder.context(plan.context).to(self.model.device)
        sources = list(dict.fromkeys(job.setting.method.source for job in jobs if job.setting.method.source))
        scored = score_context(self.model, self.tokenizer, context_ids, sources)
        examples = list(dict.fromkeys(job.example for job in jobs))
        for start in range(0, len(examples), QUESTIONS_AT_ONCE):
            block = examples[start : start + QUESTIONS_AT_ONCE]
            dense = {}
            trial = open_trial(self.model, context_ids, scored, DENSE)
            for example in block:
                dense[example] = trial.ask(self._question(example, scored, jobs))
            for setting, of_setting in _by_setting(job for job in jobs if job.example in block):
                if setting.method.name == "dense":
                    outcomes = [dense[job.example] for job in of_setting]
                else:
                    references = [dense[job.example].reference for job in of_setting]
                    outcomes = self._outcomes(plan, context_ids, scored, setting, of_setting, references)
                for job, outcome in zip(of_setting, outcomes, strict=True):
                    yield self._line(job, scored, outcome)

    def _outcomes(
        self,
        plan: ContextPlan,
        context_ids,
        scored: ScoredContext,
        setting: Setting,
        jobs: list[Job],
        references: list[Reference],
    ) -> Iterator[Outcome]:
        """Answers of one setting."""
        press = make_press(setting, plan.protection, draw_seed(setting.seed, plan.draw_salt), self.settings.audit)
        try:
            trial = open_trial(self.model, context_ids, scored, setting, press)
            for job, reference in zip(jobs, references, strict=True):
                yield trial.ask(self._question(job.example, scored, jobs), reference)
        except Exception as error:
            raise EvaluationError(
                f"method {setting.method.name} failed on task {jobs[0].example.task}, example "
                f"{jobs[0].example.index}: {type(error).__name__}: {error}"
            ) from error
        finally:
            if setting.method.is_foreign:
                forget_masks(self.model)

    def _question(self, example: Example, scored: ScoredContext, jobs: list[Job]) -> Question:
        limit = next(job.facts["max_new_tokens"] for job in jobs if job.example == example)
        ids = self.encoder.question(example).to(self.model.device)
        return Question(ids, scored.n_tokens, limit, self.stop_ids)

    def _line(self, job: Job, scored: ScoredContext, outcome: Outcome) -> dict:
        prediction = self.tokenizer.decode(outcome.tokens, skip_special_tokens=True)
        answers = list(job.example.answers)
        timing = outcome.fields.pop("timing")
        return {
            "id": job.id,
            **job.facts,
            "context_tokens": scored.n_tokens,
            "answers": answers,
            "prediction": prediction,
            "score": self.score(job.example.task, prediction, answers),
            "n_new_tokens": len(outcome.tokens),
            "divergence": vars(outcome.divergence),
            **outcome.fields,
            **self.environment,
            "timing": timing,
        }


def _by_setting(jobs: Iterator[Job]) -> list[tuple[Setting, list[Job]]]:
    """Jobs of equal settings together, in order."""
    groups: list[tuple[Setting, list[Job]]] = []
    for job in jobs:
        for setting, group in groups:
            if setting == job.setting:
                group.append(job)
                break
        else:
            groups.append((job.setting, [job]))
    return groups


def versions() -> dict[str, str]:
    """Of what the answers depend on."""
    found = {"verkv": __version__, "python": platform.python_version()}
    return found | {name: metadata.version(name) for name in ("torch", "transformers", "kvpress")}
