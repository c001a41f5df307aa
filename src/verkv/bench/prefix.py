"""A real model with a prefilled context, and sealed copies of its cache, for the benchmarks that need one."""

import copy
from dataclasses import dataclass

import torch

from verkv.bench.settings import BenchSettings, BenchSkipped

PAPER, DEFAULT = "VerKV, paper", "VerKV, default"


@dataclass
class Prefix:
    """What the benchmarks start from.

    Attributes
    ----------
    model, tokenizer
    cache : transformers.Cache
        The context's, not sealed. Copy it.
    context_ids : Tensor, shape (1, T)
    scores, queries : dict of int to Tensor
        For :meth:`verkv.VerKVPress.seal`.
    prefix_length : int
        Tokens of the chat template before the context.
    """

    model: object
    tokenizer: object
    cache: object
    context_ids: torch.Tensor
    scores: dict[int, torch.Tensor]
    queries: dict[int, torch.Tensor]
    prefix_length: int

    @property
    def next_token(self) -> torch.Tensor:
        """Some token to decode with, (1, 1)."""
        return self.context_ids[:, -1:]

    def presses(self, settings: BenchSettings) -> dict:
        """VerKV as in the paper, with its 2-bit sketch, and as this library does by default."""
        from verkv import KVzipPress, VerKVPress

        options = {
            "compression_ratio": settings.compression_ratio,
            "epsilon": settings.epsilon,
            "seed": settings.seed,
            "n_sink": min(64, settings.n_tokens // 100),
            "n_local": min(64, settings.n_tokens // 100),
            "shortlist": 32 if settings.n_tokens < 8192 else 128,
        }
        return {PAPER: VerKVPress(KVzipPress(), paper=True, **options), DEFAULT: VerKVPress(KVzipPress(), **options)}

    def sealed(self, press):
        """A copy of the cache, sealed with a press."""
        cache = copy.deepcopy(self.cache)
        press.seal(self.model, cache, self.scores, prefix_length=self.prefix_length, queries=self.queries)
        if not press.stats.sealed_layers:
            raise BenchSkipped("; ".join(press.stats.notes) or "nothing was sealed")
        return cache


def load_model(settings: BenchSettings) -> tuple:
    """The model and its tokenizer.

    Raises
    ------
    BenchSkipped
        If the demo model is not there and cannot be fetched, or a package is missing.
    ValueError
        If the model that was asked for cannot be loaded.
    """
    try:
        import kvpress  # noqa: F401
        import transformers
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise BenchSkipped(f"{error}; pip install 'verkv[demo]'") from error
    name = settings.model
    if name is None:
        from verkv.demo_model import demo_model_path

        try:
            name = str(demo_model_path())
        except RuntimeError as error:
            raise BenchSkipped(str(error)) from error
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    except OSError as error:
        raise ValueError(f"--model {name!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    finally:
        transformers.utils.logging.enable_progress_bar()
    return model.to(settings.torch_device).eval(), tokenizer


@torch.inference_mode()
def prefill(model, tokenizer, settings: BenchSettings) -> Prefix:
    """Prefill prose, and score it with KVzip's replay.

    Raises
    ------
    ValueError
        If the model does not take so many tokens, or there is not so much prose.
    """
    from verkv import KVzipPress, make_cache, record_queries
    from verkv.demo import build_task, encode_task

    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    task = build_task(tokenizer, settings.n_tokens, settings.seed)
    context_ids, _ = encode_task(tokenizer, task, model.device)
    if longest is not None and context_ids.shape[1] + 100 > longest:
        raise ValueError(f"--tokens {settings.n_tokens} is too long: the model takes {longest} tokens")
    cache = make_cache(model.config)
    with record_queries(model) as queries:
        (getattr(model, "model", None) or model.base_model)(input_ids=context_ids, past_key_values=cache)
    source = KVzipPress(tokenizer=tokenizer).source()
    source.prepare(model)
    scores = source.after_prefill(model, cache, context_ids, None)
    return Prefix(model, tokenizer, cache, context_ids, scores, dict(queries), source.prefix_length)
