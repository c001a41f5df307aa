"""Left padding: never sampled, never fetched, not in the denominator; rows of a batch know nothing of each other."""

import pytest
import torch
from kvpress import KnormPress
from press_helpers import SHORT, decode, full_layers, inclusion_probs, left_padded, positions, prefill, random_ids

from verkv import PoissonCompPress, VerKVPress, make_cache
from verkv.presses.eviction_press import EvictionPress
from verkv.tiers import HostTier, ResidentRows

LENGTHS = (70, 41, 53)
KINDS = ["llama", "gemma3", "ministral3", "qwen3_5"]
TOLERANCE = {"atol": 2e-4, "rtol": 0.0}
EXACT = {"epsilon": 1e-9, **SHORT}
PRESSES = {
    "poissoncomp": lambda: PoissonCompPress(KnormPress(), 0.5, **SHORT),
    "verkv": lambda: VerKVPress(KnormPress(), 0.5, epsilon=0.05, shortlist=16, **SHORT),
    "verkv_exact_sketch": lambda: VerKVPress(KnormPress(), 0.5, sketch="exact", epsilon=0.05, **SHORT),
    "verkv_paper": lambda: VerKVPress(KnormPress(), 0.5, epsilon=0.05, shortlist=16, paper=True, **SHORT),
    "verkv_fetch_all": lambda: VerKVPress(KnormPress(), 0.5, shortlist=500, **EXACT),
    "eviction": lambda: EvictionPress(0.5),
}


def make_rows():
    return [random_ids(1, n, seed=10 + i) for i, n in enumerate(LENGTHS)]


def random_scores(lengths, n_layers, width, scale=1.0):
    """By layer, (B, Hkv, T); a row's scores depend on its length alone, not on what stands beside it."""
    scores = {}
    for layer in range(n_layers):
        rows = []
        for n in lengths:
            generator = torch.Generator().manual_seed(1000 * layer + n)
            row = scale * torch.rand(1, 2, n, generator=generator) ** 4
            rows.append(torch.nn.functional.pad(row, (width - n, 0)))
        scores[layer] = torch.cat(rows)
    return scores


def prefilled(model, rows):
    ids, mask = left_padded(rows)
    cache = prefill(model, ids, cache=make_cache(model.config), attention_mask=mask, position_ids=positions(mask))
    return cache, mask


def ask(model, cache, mask, question):
    """A question and a step; logits (B, n, vocabulary)."""
    logits = []
    for part in question.split((question.shape[1] - 1, 1), dim=1):
        mask = torch.cat([mask, torch.ones_like(part)], 1)
        options = {"attention_mask": mask, "position_ids": positions(mask)[:, -part.shape[1] :]}
        logits.append(decode(model, part, cache, **options))
    return torch.cat(logits, 1)


def codes_of(cache, layer):
    """(C, Hkv, T) of a layer that keeps a byte of every token."""
    return cache.layers[layer].context.codes.unflatten(0, (-1, 2))


@pytest.mark.parametrize("name", PRESSES)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_padding_is_neither_sampled_nor_fetched(tiny_model, monkeypatch, by_torch, kind, name):
    """Seen where rows are read: every row of the sample, and every row that the host is asked for."""
    model, read, sampled = tiny_model(kind), [], []
    cache, mask = prefilled(model, make_rows())
    n_padding = (mask == 0).sum(-1).repeat_interleave(2)
    gather = ResidentRows.gather.__func__

    def recording_gather(cls, keys, values, codes, *surplus):
        sampled.append((codes.flatten(0, 1) & 0x80).nonzero())
        return gather(cls, keys, values, codes, *surplus)

    def record(name):
        original = getattr(HostTier, name)

        def recording(self, units, positions, device):
            read.append(torch.stack([units, positions], 1))
            return original(self, units, positions, device)

        monkeypatch.setattr(HostTier, name, recording)

    monkeypatch.setattr(ResidentRows, "gather", classmethod(recording_gather))
    record("read_keys"), record("read_values")
    press = PRESSES[name]()
    layers = [i for i, is_sliding in enumerate(cache.is_sliding) if not is_sliding]
    scores = random_scores(LENGTHS, len(cache.layers), LENGTHS[0])
    press.seal(model, cache, {i: scores[i] for i in layers}, attention_mask=mask)
    assert full_layers(cache) == layers
    ask(model, cache, mask, random_ids(3, 5, seed=2))
    for pairs, expected in ((sampled, len(layers)), (read, None)):
        units, tokens = torch.cat(pairs or [torch.zeros(0, 2, dtype=torch.long)]).unbind(-1)
        assert (tokens >= n_padding[units]).all() and (tokens < LENGTHS[0]).all()
        assert expected is None or (len(pairs) == expected and len(units) > 0)
    assert (sum(len(pairs) for pairs in read) > 0) == name.startswith("verkv")


@pytest.mark.parametrize("poison", [1e3, float("nan")], ids=["huge", "nan"])
@pytest.mark.parametrize("name", PRESSES)
def test_keys_and_values_of_padding_change_nothing(tiny_model, name, poison):
    """Not the estimate, not the plan, not the audit: whatever an attention function leaves there."""
    model, logits, errors = tiny_model("llama"), [], []
    for fill in (None, poison):
        cache, mask = prefilled(model, make_rows())
        if fill is not None:
            for layer in cache.layers:
                hidden = (mask == 0)[:, None, :, None]
                layer.keys, layer.values = (t.masked_fill(hidden, fill) for t in (layer.keys, layer.values))
        press = PRESSES[name]()
        press.audit = True
        press.seal(model, cache, random_scores(LENGTHS, 4, LENGTHS[0]), attention_mask=mask)
        logits.append(ask(model, cache, mask, random_ids(3, 5, seed=2)))
        errors.append(press.stats.relative_errors())
        assert logits[-1].isfinite().all() and errors[-1].isfinite().all()
    torch.testing.assert_close(*logits, **TOLERANCE)
    torch.testing.assert_close(*errors, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("press_class", [PoissonCompPress, VerKVPress])
def test_budgets_follow_each_rows_real_length(tiny_model, press_class):
    model = tiny_model("llama")
    cache, mask = prefilled(model, make_rows())
    captured = {}

    class Recording(press_class):
        def _plans(self, *args):
            plans, notes = super()._plans(*args)
            captured.update(plans)
            return plans, notes

    press = Recording(KnormPress(), 0.5, **SHORT)
    press.seal(model, cache, random_scores(LENGTHS, 4, LENGTHS[0]), attention_mask=mask)
    together = [inclusion_probs(captured[i].codes) * (captured[i].codes > 0) for i in range(4)]
    for row, n in enumerate(LENGTHS):
        alone, row_mask = prefilled(model, make_rows()[row : row + 1])
        press.seal(model, alone, random_scores((n,), 4, n), attention_mask=row_mask)
        for layer in range(4):
            own = inclusion_probs(captured[layer].codes)
            torch.testing.assert_close(together[layer][row : row + 1, :, -n:], own, atol=1e-12, rtol=0.0)
            assert not together[layer][row, :, :-n].any() or n == LENGTHS[0]


@pytest.mark.parametrize("name", ["verkv_fetch_all", "eviction"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gets_what_it_gets_alone(tiny_model, kind, name):
    model, rows = tiny_model(kind), make_rows()
    question = random_ids(3, 6, seed=5)
    n_layers = model.config.num_hidden_layers

    def answer(chosen, question):
        lengths = [row.shape[1] for row in chosen]
        cache, mask = prefilled(model, chosen)
        PRESSES[name]().seal(model, cache, random_scores(lengths, n_layers, max(lengths)), attention_mask=mask)
        assert full_layers(cache)
        return ask(model, cache, mask, question)

    if kind == "ministral3":  # its query scale counts padding in transformers before 5.3: rows of one length
        rows = [row[:, -41:] for row in rows]
    together = answer(rows, question)
    for i, row in enumerate(rows):
        torch.testing.assert_close(together[i : i + 1], answer([row], question[i : i + 1]), **TOLERANCE)


@pytest.mark.parametrize("scope", ["head", "layer", "model"])
def test_scores_of_one_row_do_not_change_those_of_another(tiny_model, scope):
    """One row's scores lie in [0, 1], its neighbour's do not and become a softmax: each as if it were alone."""
    model, rows = tiny_model("llama"), make_rows()[:2]
    question = random_ids(2, 6, seed=5)
    small = random_scores(LENGTHS[:1], 4, LENGTHS[0])
    large = random_scores(LENGTHS[1:2], 4, LENGTHS[0], scale=20.0)
    spread = torch.tensor([1.0, 0.1])[:, None]  # a softmax would make heads equally important
    scores = {i: torch.cat([small[i] * spread, large[i]]) for i in range(4)}
    kept = {}

    class Recording(EvictionPress):
        def _plans(self, *args):
            plans, notes = super()._plans(*args)
            kept.update({i: plan.codes for i, plan in plans.items()})
            return plans, notes

    press = Recording(0.5, budget_scope=scope)
    cache, mask = prefilled(model, rows)
    press.seal(model, cache, scores, attention_mask=mask)
    codes = dict(kept)
    together = ask(model, cache, mask, question)
    for i, row in enumerate(rows):
        n = row.shape[1]
        alone, row_mask = prefilled(model, [row])
        press.seal(model, alone, {j: scores[j][i : i + 1, :, -n:] for j in range(4)}, attention_mask=row_mask)
        assert all(torch.equal(kept[j], codes[j][i : i + 1, :, -n:]) for j in range(4))
        alone_logits = ask(model, alone, row_mask, question[i : i + 1])
        torch.testing.assert_close(together[i : i + 1], alone_logits, **TOLERANCE)
