"""KVzip scores: the largest attention a token receives while the model repeats its context (arXiv:2505.23416)."""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from verkv.attention import observe_attention
from verkv.cache import counted_apart, layer_kinds
from verkv.checks import check_count
from verkv.hybrid import LinearLayer
from verkv.members import join_layers
from verkv.presses.eviction_press import EvictionPress
from verkv.presses.prompt import left_padding
from verkv.presses.scores import Scores, Tail

FIRST_PROMPT = "\n\nRepeat the previous context exactly."
NEXT_PROMPT = "\n\nRepeat the part of the previous context exactly, starting with"
N_CUE_TOKENS = 8  # of the previous chunk, appended to NEXT_PROMPT
ROWS_AT_ONCE = 64  # query rows of a replay whose logits are formed together: they stay in a CPU's cache


@dataclass
class KVzipPress(EvictionPress):
    """KVzip's importance scores; used alone, its eviction of the lowest-scored tokens.

    The prompt is replayed in chunks on top of its own cache, so scoring costs about twice the prefill. Scores are taken
    where attention is computed, after norm, RoPE and query scaling, so they work for every architecture and batch size;
    in float32 they equal those of KVPress' ``KVzipPress``.

    Parameters
    ----------
    compression_ratio, budget_scope, n_sink, audit
        As in :class:`~verkv.presses.eviction_press.EvictionPress`. Without effect on the scores that
        ``PoissonCompPress`` and ``VerKVPress`` take from this press, but for ``n_sink``.
    chunk_size : int
        Context tokens repeated by each replay.
    tokenizer : PreTrainedTokenizerBase, optional
        Of the model; loaded by the model's name if not given.

    References
    ----------
    Kim et al., "KVzip: Query-agnostic KV Cache Compression with Context Reconstruction", arXiv:2505.23416.
    """

    chunk_size: int = 2048
    tokenizer: object = field(default=None, repr=False)

    def __post_init__(self):
        super().__post_init__()
        check_count("chunk_size", self.chunk_size, least=1)

    def source(self) -> "ReplaySource":
        """A fresh replay scorer."""
        return ReplaySource(self.n_sink, self.chunk_size, self.tokenizer)


@dataclass
class ReplaySource:
    """Scores by replay; see :class:`KVzipPress`."""

    n_sink: int = 4
    chunk_size: int = 2048
    tokenizer: object = None

    name = "KVzip"
    on_attention = None
    prefix_length = 0
    records = "ids"

    def prepare(self, model) -> None:
        """Tokenise the chat template's two halves.

        Raises
        ------
        ValueError
            If there is no tokenizer for the model.
        """
        tokenizer = self.tokenizer or _load_tokenizer(model)
        prefix, suffix = _template_halves(tokenizer)
        self._encode = lambda text: tokenizer.encode(text, return_tensors="pt", add_special_tokens=False)
        self.prefix_length = self._encode(prefix).shape[1] if prefix else 0
        self._suffix = self._encode(suffix)

    def after_prefill(self, model, cache, input_ids: Tensor | None, attention_mask: Tensor | None) -> Scores:
        """Replay the context chunk by chunk and take the largest attention each token receives.

        Raises
        ------
        ValueError
            If the prompt was given as embeddings: there is nothing to repeat.
        """
        if input_ids is None:
            raise ValueError("KVzip repeats the prompt and needs input_ids; inputs_embeds alone cannot be scored")
        batch, n_tokens = input_ids.shape
        n_padding = left_padding(attention_mask, batch, n_tokens)
        if not bool(n_padding.any()):
            return self._replay_all(model, cache, input_ids)
        # Rows of different lengths have sinks and chunks at different places: one by one, each without its padding.
        scores: dict[int, list[Tensor]] = {}
        for row, pad in enumerate(n_padding.tolist()):
            row_scores = self._replay_all(model, _row_of(cache, row, n_tokens - pad), input_ids[row : row + 1, pad:])
            for i, score in row_scores.items():
                scores.setdefault(i, []).append(nn.functional.pad(score, (pad, 0)))
        return {i: torch.cat(rows) for i, rows in scores.items()}

    def _replay_all(self, model, cache, input_ids: Tensor) -> Scores:
        """Scores of rows without padding."""
        n_tokens = input_ids.shape[1]
        prefix = self.prefix_length if self.prefix_length < n_tokens else 0
        kinds = layer_kinds(model.config)
        recorder = _ReplayRecorder(n_tokens, self.n_sink, {i for i, k in enumerate(kinds) if k == "full_attention"})
        backbone = getattr(model, "model", None) or model.base_model
        previous = None
        with observe_attention(recorder.observe):
            for start in range(prefix, n_tokens, self.chunk_size):
                chunk = input_ids[:, start : start + self.chunk_size]
                recorder.chunk = slice(start, start + chunk.shape[1])
                replay = torch.cat([self._prompt(previous, input_ids), chunk], dim=1)
                _replay(backbone, cache, replay)
                previous = chunk
        return recorder.scores

    def score_tail(self, model, cache, tail: Tail) -> Scores:
        """Replay the tail's first tokens on top of the cache, sealed segments and all.

        Attention over what is sealed is exact where the host has it. What a token receives is judged as in a prefill:
        among the sinks, its chunk and the replay.

        Raises
        ------
        ValueError
            If ids of the tail are not known.
        """
        first, n_tail = cache.layers[tail.layers[0]], tail.is_token.shape[1]
        ids = self.known_ids(first, n_tail).to(first.context.device)
        start_of_tail = ids.shape[1] - n_tail
        recorder = _TailRecorder(tail, min(self.n_sink, tail.n_first))
        backbone = getattr(model, "model", None) or model.base_model
        is_token = torch.cat([first.context.is_token().repeat_interleave(first.context.beams, 0), tail.is_token], 1)
        with observe_attention(lambda *_: None, recorder.observe), counted_apart(cache, "replays", exact=True):
            for start in range(0, tail.n_new, self.chunk_size):
                recorder.chunk = slice(start, min(start + self.chunk_size, tail.n_new))
                before, chunk = ids[:, : start_of_tail + start], ids[:, start_of_tail:][:, recorder.chunk]
                previous = before if bool((before[:, -N_CUE_TOKENS:] >= 0).all()) else None
                replay = torch.cat([self._prompt(previous, chunk), chunk], dim=1)
                _replay(backbone, cache, replay, **_placed(is_token, replay.shape[1]))
        return recorder.scores

    @staticmethod
    def known_ids(layer, n_tail: int) -> Tensor:
        """Ids (B, T) of all tokens, those of the tail known."""
        ids = layer.record and layer.record.ids
        if ids is None or ids.shape[1] != layer.get_seq_length() or bool((ids[:, -n_tail:] < 0).any()):
            raise ValueError(
                f"KVzip repeats what it scores, and the ids of some of the tail's {n_tail} tokens are not known: run "
                f"the model on input_ids inside `with press(model)`, with reseal_every or max_tail set (math.inf will "
                f"do), or pass scores="
            )
        return ids

    def _prompt(self, previous: Tensor | None, input_ids: Tensor) -> Tensor:
        """The request to repeat, ending where the answer starts, (B, P)."""
        request = self._encode(FIRST_PROMPT if previous is None else NEXT_PROMPT)
        batch = len(input_ids)
        repeat = lambda ids: ids.to(input_ids).expand(batch, -1)  # noqa: E731
        cue = [] if previous is None else [previous[:, -N_CUE_TOKENS:]]
        return torch.cat([repeat(request), *cue, repeat(self._suffix)], dim=1)


class _ReplayRecorder:
    """Observes the attention of a replay and keeps, per context token, the largest weight any query row gives it."""

    def __init__(self, n_tokens: int, n_sink: int, layers: set[int]):
        self.n_tokens, self.n_sink, self.layers = n_tokens, n_sink, layers
        self.scores: Scores = {}
        self.chunk = slice(0, 0)

    def observe(self, module: nn.Module, query: Tensor, key: Tensor, scaling: float) -> None:
        """Softmax over sinks, the chunk and the replay itself; the maximum over query heads and rows is the score."""
        if module.layer_idx not in self.layers:
            return
        start, stop = self.chunk.start, self.chunk.stop
        n_sink, n_replayed = min(self.n_sink, start), query.shape[2]
        context = torch.cat([key[:, :, :n_sink], key[:, :, start:stop]], dim=2)
        best = _largest_received(query, context, key[:, :, -n_replayed:], n_sink, scaling)
        if module.layer_idx not in self.scores:
            self.scores[module.layer_idx] = best.new_zeros(*best.shape[:2], self.n_tokens)
        self.scores[module.layer_idx][..., self.chunk] = best.exp()


class _TailRecorder:
    """Observes the attention of a replay on a sealed cache, and keeps the same of tokens of the tail."""

    def __init__(self, tail: Tail, n_sink: int):
        self.tail, self.n_sink = tail, n_sink
        self.scores: Scores = {}
        self.chunk = slice(0, 0)

    def observe(self, module: nn.Module, query: Tensor, layer, scaling: float) -> None:
        """As :meth:`_ReplayRecorder.observe`; the replay is the end of the layer's tail."""
        sinks = layer.context.rows.first(self.n_sink).unflatten(0, (-1, layer.context.n_kv_heads))
        sinks = sinks.repeat_interleave(layer.context.beams, 0)
        n_replayed, keys = query.shape[2], layer.tail_keys
        context = torch.cat([sinks, keys[:, :, self.chunk]], dim=2)
        hidden = ~self.tail.is_token[:, self.chunk]
        best = _largest_received(query, context, keys[:, :, -n_replayed:], self.n_sink, scaling, hidden)
        if module.layer_idx not in self.scores:
            self.scores[module.layer_idx] = best.new_zeros(*best.shape[:2], self.tail.n_new)
        self.scores[module.layer_idx][..., self.chunk] = best.exp()


def _largest_received(
    query: Tensor, context: Tensor, replayed: Tensor, n_sink: int, scaling: float, hidden: Tensor | None = None
) -> Tensor:
    """Log of the largest weight that each token of a chunk gets from any query head and row, (B, Hkv, n).

    The softmax is over ``n_sink`` sinks and the chunk, which are ``context``, and the replay itself, which ends with
    the chunk's tokens. ``hidden`` (B, n) tokens give nothing and receive nothing.
    """
    batch, _, n_replayed, head_dim = query.shape
    n_kv_heads, n_chunk = context.shape[1], context.shape[2] - n_sink
    keys = torch.cat([context, replayed], dim=2).unsqueeze(2).float()
    rows = query.view(batch, n_kv_heads, -1, n_replayed, head_dim).float()
    best = rows.new_full((batch, n_kv_heads, n_chunk), -torch.inf)
    masked = hidden is not None and bool(hidden.any())
    if masked:
        shown = torch.zeros(batch, n_sink + n_replayed, dtype=torch.bool, device=rows.device)
        absent = torch.cat([shown[:, :n_sink], hidden, shown[:, n_sink:-n_chunk], hidden], 1)
    for first in range(0, n_replayed, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, n_replayed)
        n_visible = context.shape[2] + last  # causal: replayed tokens behind the block are not seen by it
        logits = rows[..., first:last, :] @ keys[..., :n_visible, :].mT * scaling  # (B, Hkv, G, rows, visible)
        future = torch.ones(last - first, last - first, dtype=torch.bool, device=logits.device).triu(1)
        logits[..., first - last :].masked_fill_(future, -torch.inf)
        if masked:
            logits.masked_fill_(absent[:, None, None, None, :n_visible], -torch.inf)
        received = logits[..., n_sink : n_sink + n_chunk] - logits.logsumexp(-1, keepdim=True)
        if masked:
            silent = absent[:, n_sink + n_chunk :][:, first:last]
            received.masked_fill_(silent[:, None, None, :, None], -torch.inf)
        best = torch.maximum(best, received.amax((2, 3)))
    return best


def _row_of(cache, row: int, n_tokens: int):
    """A cache of one row's last ``n_tokens`` tokens, which are views of the cache's; sliding layers hold fewer."""
    alone = copy.copy(cache)
    alone.layers = [copy.copy(layer) for layer in cache.layers]
    join_layers(alone.layers)
    for layer in alone.layers:
        if isinstance(layer, LinearLayer):  # padding is masked to zeros, which leave an empty state empty
            layer.state = layer.state.row(row, n_tokens)
            continue
        layer.keys, layer.values = (t[row : row + 1, :, -n_tokens:] for t in (layer.keys, layer.values))
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = n_tokens
    return alone


def _placed(is_token: Tensor, n_new: int) -> dict[str, Tensor]:
    """Mask and positions of ``n_new`` tokens behind those of ``is_token`` (B, T), where some are hidden."""
    if bool(is_token.all()):
        return {}
    mask = torch.nn.functional.pad(is_token, (0, n_new), value=True).long()
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1)[:, -n_new:].clamp_min(0)}


def _replay(backbone: nn.Module, cache, replay: Tensor, **placed: Tensor) -> None:
    """Run the replay on top of the cache, then take its tokens out again, also if it fails."""
    before = [_layer_state(layer) for layer in cache.layers]
    try:
        backbone(input_ids=replay, past_key_values=cache, use_cache=True, **placed)
    finally:
        for layer, state in zip(cache.layers, before, strict=True):
            for name, value in state.items():
                setattr(layer, name, value)


def _layer_state(layer) -> dict[str, object]:
    """Attributes to set again. References are enough: layers append by concatenation, never in place."""
    names = ["state"] if isinstance(layer, LinearLayer) else ["keys", "values", "cumulative_length"]
    return {name: getattr(layer, name) for name in names if hasattr(layer, name)}


def _template_halves(tokenizer) -> tuple[str, str]:
    """What the chat template puts before and after a user's message."""
    if tokenizer.chat_template is None:
        return "", "\n"
    # A separator that no template contains marks where the message ends. The newline keeps the tokens before it apart.
    message, separator = "dummy context", "\n" + "#" * 13
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": message + separator}],
        add_generation_prompt=True,
        tokenize=False,
        enable_thinking=False,
    )
    before, suffix = text.split(separator)
    return before.split(message)[0], suffix


def _load_tokenizer(model):
    from transformers import AutoTokenizer

    name = model.config.name_or_path
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise ValueError(
            f"KVzip needs the model's tokenizer and found none at {name!r}; pass KVzipPress(tokenizer=...)"
        ) from error
