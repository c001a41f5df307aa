"""Tables against figures computed by hand."""

import numpy as np
import pytest
from answers import answer

from verkv.report import groups, tables


def scored(method: str, scores: dict[str, list[float]], compression: float = 16.0, **changes) -> list[dict]:
    """Lines of a method: scores of each task's examples."""
    return [
        answer(method, task, i, compression, score=score, **changes)
        for task, values in scores.items()
        for i, score in enumerate(values)
    ]


HAND = (
    scored("dense", {"vt": [1.0, 0.5], "qa_1": [1.0, 0.0, 0.0, 0.0]})
    + scored("kvzip", {"vt": [0.5, 0.0], "qa_1": [1.0, 0.0, 0.0, 0.0]})
    + scored("verkv", {"vt": [1.0, 0.5]})
)


def rows(lines: list[dict]) -> dict:
    """Quality by (name, compression)."""
    return {(row.name, row.compression): row for row in tables.quality(lines)}


def test_quality_is_the_mean_over_tasks():
    found = rows(HAND)
    assert found["Dense", 1.0].score.value == pytest.approx(50.0)  # (75 + 25) / 2
    assert found["KVzip", 16.0].score.value == pytest.approx(25.0)  # (25 + 25) / 2
    assert found["KVzip", 16.0].fraction.value == pytest.approx(0.5)


def test_a_method_is_compared_with_dense_on_its_own_questions():
    found = rows(HAND)["VerKV (2-bit)", 16.0]
    assert found.score.value == pytest.approx(75.0)
    assert found.fraction.value == pytest.approx(1.0)  # dense has 75 on vt, not its 50 on both tasks
    assert (found.score.n_examples, found.score.n_tasks) == (2, 1)


def test_only_questions_that_both_answered_count():
    lines = scored("dense", {"vt": [0.0, 1.0]}) + scored("kvzip", {"vt": [1.0, 0.5, 1.0]})
    assert rows(lines)["KVzip", 16.0].fraction.value == pytest.approx(1.5)  # (1 + 0.5) / (0 + 1)


def test_tasks_that_dense_solves():
    assert tables.solved_tasks(groups.dense_lines(HAND)) == ["vt"]
    found = rows(HAND)["KVzip", 16.0]
    assert found.fraction_on_solved.value == pytest.approx(25 / 75)


def test_dense_is_shown_on_the_questions_asked_at_a_rate():
    lines = HAND + scored("kvzip", {"vt": [0.0, 0.0]}, compression=32.0)
    found = rows(lines)
    assert found["Dense", 32.0].score.value == pytest.approx(75.0)
    assert found["Dense", 16.0].score.value == pytest.approx(50.0)


def test_draws_of_a_question_are_averaged_and_are_one_example():
    lines = scored("dense", {"vt": [1.0, 1.0]})
    for seed, scores in ((0, [1.0, 0.0]), (1, [0.0, 0.0])):
        lines += scored("verkv", {"vt": scores}, seed=seed)
    found = rows(lines)["VerKV (2-bit)", 16.0]
    assert found.score.value == pytest.approx(25.0)
    assert found.score.n_examples == 2


def test_where_dense_solves_nothing_there_is_no_fraction():
    lines = scored("dense", {"vt": [0.0, 0.0]}) + scored("kvzip", {"vt": [1.0, 0.0]})
    assert rows(lines)["KVzip", 16.0].fraction is None


def test_a_press_without_a_rate_is_shown_and_is_no_rate():
    foreign = {"label": "Own", "method": "kvpress:DMSPress", "compression": None}
    lines = HAND + [line | foreign for line in scored("kvzip", {"vt": [1.0, 1.0]})]
    assert tables.compressions(lines) == [16.0]
    assert rows(lines)["Own", groups.UNRATED].score.value == pytest.approx(100.0)


def test_settings_of_a_label_are_told_apart_by_what_differs():
    lines = [answer("verkv", epsilon=e, delta=d) for e, d in ((0.1, 0.1), (0.05, 0.1))]
    assert list(groups.variants(lines)) == ["VerKV (2-bit), ε\u00a00.05", "VerKV (2-bit), ε\u00a00.1"]
    lines = [answer("verkv", options={"alpha": a, "paper": True}) for a in (0.0, 0.5)]
    assert list(groups.variants(lines)) == ["VerKV (2-bit), alpha 0.0", "VerKV (2-bit), alpha 0.5"]
    lines = [answer("verkv", n_tokens=n, options={"n_sink": n // 375}) for n in (3000, 6000)]
    assert list(groups.variants(lines)) == ["VerKV (2-bit)"]


def test_the_main_setting_has_the_most_answers_then_the_usual_tolerance():
    lines = [answer("verkv", example=i, epsilon=e) for e in (0.01, 0.05, 0.3) for i in range(2)]
    assert {line["epsilon"] for line in groups.main_setting(lines)} == {0.05}
    lines += [answer("verkv", example=2, epsilon=0.3)]
    assert {line["epsilon"] for line in groups.main_setting(lines)} == {0.3}


def test_order_compares_pairs_and_names_the_exceptions():
    lines = scored("kvzip", {"vt": [0.0, 0.5], "qa_1": [1.0, 1.0]})
    lines += scored("poissoncomp", {"vt": [1.0, 1.0], "qa_1": [1.0, 0.5]})
    (row,) = tables.order(lines)
    assert (row.better, row.worse, row.compression) == ("PoissonComp", "KVzip", 16.0)
    assert row.points.value == pytest.approx((75 - 25) / 2)
    assert row.exceptions == {"qa_1": pytest.approx(-25.0)}


@pytest.mark.parametrize(
    ("better", "verdict"),
    [
        ([1.0, 1.0, 1.0], "yes, beyond the noise"),
        ([0.0, 0.0, 0.0], "no, beyond the noise"),
        ([0.5, 0.5, 0.5], "equal"),
        ([0.0, 0.6, 1.0], "yes, within the noise of this sample"),
    ],
)
def test_verdicts(better, verdict):
    lines = scored("kvzip", {"vt": [0.5, 0.5, 0.5]}) + scored("poissoncomp", {"vt": better})
    assert tables.order(lines)[0].verdict == verdict


def test_fetch_statistics_pool_decisions():
    stats = {"kv_read_per_forward": 0.2, "kv_read_per_token": 0.1}
    stats |= {"question_decisions": 100, "question_fetch_rate": 0.5, "question_kv_head_fetch_rate": 1.0}
    stats |= {"question_promoted": 1000, "decode_promoted": 100}
    stats |= {"decode_decisions": 10, "decode_fetch_rate": 1.0, "decode_kv_head_fetch_rate": 0.5}
    more = stats | {"decode_decisions": 30, "decode_fetch_rate": 0.0, "decode_promoted": 0, "kv_read_per_token": 0.3}
    lines = [answer("verkv", example=i, stats=s, context_tokens=1000) for i, s in enumerate((stats, more))]
    (row,) = tables.fetching(lines)
    assert row.decisions_question == pytest.approx(0.5)
    assert row.decisions_decode == pytest.approx(10 / 40)
    assert row.kv_heads_question == pytest.approx(1.0)
    assert row.tokens_question == pytest.approx(
        (2 * 1000 / 1000) / 100
    )  # 20 tokens of 1,000 for each fetching decision
    assert row.tokens_decode == pytest.approx((100 / 1000) / 10)
    assert row.read_per_token.value == pytest.approx(0.2)
    assert row.resident == pytest.approx(1 / 16, abs=1e-4)


def test_methods_that_never_fetch_are_not_in_the_fetch_table():
    never = answer("poissoncomp")
    assert never["stats"]["decode_promoted"] == 0
    assert [row.name for row in tables.fetching([never, answer("verkv")])] == ["VerKV (2-bit)"]


def test_violations_are_pooled_over_decisions():
    audits = [{"violation_rate": 0.1, "n_decisions": 100}, {"violation_rate": 0.0, "n_decisions": 300}]
    lines = [answer("verkv", example=i, audit=audit) for i, audit in enumerate(audits)]
    (row,) = tables.tolerances(lines)
    assert row.violations.value == pytest.approx(10 / 400)
    assert row.n_decisions == 400


def test_audits_without_a_tolerance_are_no_violations():
    line = answer("verkv", audit={"violation_rate": None, "n_decisions": 100})
    assert tables.tolerances([line])[0].violations is None


def test_divergence_leaves_dense_out():
    lines = [answer("dense"), answer("kvzip", divergence={"kl": 2.0, "same_next": 0.5, "n_tokens": 8})]
    lines += [answer("kvzip", example=1, divergence={"kl": 1.0, "same_next": 1.0, "n_tokens": 8})]
    (row,) = tables.divergence(lines)
    assert (row.kl.value, row.same_next.value) == (1.5, 0.75)


def test_scores_by_task():
    found = {(row.name, row.task): row for row in tables.per_task(HAND)}
    assert found["KVzip", "qa_1"].score == pytest.approx(25.0)
    assert found["KVzip", "qa_1"].n_examples == 4


def test_pairs_keep_the_order_of_questions():
    ours, theirs = scored("kvzip", {"vt": [0.1, 0.2]}), scored("dense", {"vt": [0.3, 0.4]})[::-1]
    pairs = groups.paired_strata(ours, theirs, groups.score)
    np.testing.assert_allclose(pairs["vt"], [[10, 30], [20, 40]])
