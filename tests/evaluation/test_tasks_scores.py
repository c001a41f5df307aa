"""RULER's and LOFT's scores on cases worked out by hand from their definitions."""

import pytest

from verkv.evaluation import tasks

score, normalise, listed_items = tasks.score, tasks.scores.normalise, tasks.scores.listed_items

ALL = [  # prediction, answers, share of answers found
    ("The number is 1234567.", ["1234567"], 1.0),
    ("12345678", ["1234567"], 1.0),  # within a longer number too: RULER looks for the string
    ("1 234 567", ["1234567"], 0.0),
    ("", ["1234567"], 0.0),
    (" \n\t ", ["1234567"], 0.0),
    ("Amber-Anchor", ["amber-anchor"], 1.0),
    ("amber-anchor", ["AMBER-ANCHOR"], 1.0),
    ("amber anchor", ["amber-anchor"], 0.0),
    ("4, 3, 2", ["1", "2", "3", "4"], 0.75),
    ("they are 11 and 22", ["11", "22", "33", "44"], 0.5),
    ("11", ["11", "11"], 1.0),  # each answer is looked for on its own
    ("ÉCOLE", ["école"], 1.0),
    ("ecole", ["école"], 0.0),  # no accents are removed
    ("STRASSE", ["straße"], 0.0),  # lower case, not case folding
    ("日本語です", ["日本"], 1.0),
    ("12\n34", ["1234"], 0.0),  # a line break is no part of an answer
    ("\x0012\x1f", ["12"], 1.0),
    ("anything", [""], 1.0),  # the empty string lies in every string
]


@pytest.mark.parametrize("prediction, answers, expected", ALL)
@pytest.mark.parametrize("task", ["niah_single_1", "niah_multivalue", "vt", "cwe", "fwe"])
def test_string_match_all(task, prediction, answers, expected):
    assert score(task, prediction, answers) == expected


PART = [
    ("It was Warsaw, I think.", ["Warsaw"], 1.0),
    ("it was warsaw", ["Krakow", "Warsaw"], 1.0),  # one alternative is enough, and no more than 1
    ("Warsaw or Krakow", ["Krakow", "Warsaw"], 1.0),
    ("the City of Lights", ["City Of Lights"], 1.0),
    ("the capital", ["Warsaw", "Krakow"], 0.0),
    ("", ["Warsaw"], 0.0),
    ("U.S.", ["US"], 0.0),  # punctuation counts
    ("Kraków", ["kraków"], 1.0),
]


@pytest.mark.parametrize("prediction, answers, expected", PART)
@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_string_match_part(task, prediction, answers, expected):
    assert score(task, prediction, answers) == expected


SINGLE = [
    ("Final Answer: ['Warsaw']", ["Warsaw"], 1.0),
    ("TITLE: Warsaw | ID: 3\nFinal Answer: ['the city of Warsaw']", ["Warsaw"], 1.0),  # the answer within the item
    ("Final Answer: ['Warsaw']", ["the city of Warsaw"], 0.0),  # not the other way round
    ("Final Answer: ['Krakow', 'Warsaw']", ["Warsaw"], 0.0),  # the first item alone counts
    ("Final Answer: ['The U.S. Army!']", ["us army"], 1.0),
    ("Final Answer: ['WARSAW']", ["warsaw"], 1.0),
    ("Final Answer: ['Kraków']", ["Krako\u0301w"], 1.0),  # composed and decomposed are the same
    ("Final Answer: ['Krakow']", ["Kraków"], 0.0),  # the accent stays as a character of its own
    ("Final Answer: [1066]", ["1066"], 1.0),
    ("**Final Answer: ['Warsaw']**", ["Warsaw"], 1.0),
    ("Final Answer: ['devil's sleep']", ["Devil's Sleep"], 1.0),
    ("['first'] \n ['second']", ["second"], 0.0),  # the first line with a list
    ("Warsaw", ["Warsaw"], 0.0),  # no list, no answer
    ("Final Answer: [Warsaw]", ["Warsaw"], 0.0),  # a list of Python's needs quotes
    ("Final Answer: ['Warsaw'", ["Warsaw"], 0.0),
    ("]odd[", ["odd"], 0.0),
    ("Final Answer: []", ["Warsaw"], 0.0),
    ("Final Answer: ['']", ["Warsaw"], 0.0),
    ("", ["Warsaw"], 0.0),
    ("Final Answer: ['Ottawa']", ["Toronto", "Ottawa"], 1.0),
    ("Final Answer: ['Ottawa']", ["the"], 0.0),  # an answer of which nothing is left matches nothing
]


@pytest.mark.parametrize("prediction, answers, expected", SINGLE)
@pytest.mark.parametrize("task", ["loft_nq", "loft_hotpotqa", "loft_musique"])
def test_subspan_exact_match(task, prediction, answers, expected):
    assert score(task, prediction, answers) == expected


SEVERAL = [
    ("Final Answer: ['q', 'p']", ["P", "Q"], 1.0),
    ("Final Answer: ['p']", ["p", "q"], 0.0),  # all are wanted
    ("Final Answer: ['p', 'q', 'r']", ["p", "q"], 1.0),  # more does not hurt
    ("Final Answer: ['x and y']", ["x", "y"], 0.0),  # an item answers once
    ("Final Answer: ['Moon (film)', 'Mars']", ["moon", "planet Mars"], 1.0),  # either within the other
    # "red car" fits both answers and "car" only the second: the alignment must give "red car" to the first.
    ("Final Answer: ['red car', 'car']", ["red", "car"], 1.0),
    ("Final Answer: ['car', 'red car']", ["car", "red"], 1.0),
    ("Final Answer: ['', '']", ["p", "q"], 0.0),
    ("Final Answer: ['a']", ["a"], 0.0),  # an article: nothing is left of it
    ("Final Answer: [1, 2]", ["2", "1"], 1.0),
    ("p, q", ["p", "q"], 0.0),
    ("", ["p"], 0.0),
]


@pytest.mark.parametrize("prediction, answers, expected", SEVERAL)
@pytest.mark.parametrize("task", ["loft_qampari", "loft_quest"])
def test_aligned_subspan_exact_match(task, prediction, answers, expected):
    assert score(task, prediction, answers) == expected


@pytest.mark.parametrize("seed", range(5))
def test_alignment_agrees_with_an_assignment_solver(seed):
    import random

    import numpy as np
    from scipy.optimize import linear_sum_assignment

    rng = random.Random(seed)
    outcomes = set()
    for _ in range(40):
        answers = ["".join(rng.choices("xyz", k=2)) for _ in range(rng.randint(1, 4))]
        items = ["".join(rng.choices("xyz", k=rng.randint(1, 3))) for _ in range(rng.randint(1, 5))]
        fits = np.array([[answer in item or item in answer for item in items] for answer in answers], dtype=float)
        rows, columns = linear_sum_assignment(-fits)
        expected = float(fits[rows, columns].sum() == len(answers))
        outcomes.add(expected)
        assert score("loft_quest", f"Final Answer: {items}", answers) == expected
    assert outcomes == {0.0, 1.0}


@pytest.mark.parametrize(
    "text, expected",
    [
        ("The  Cat, a dog & AN owl.", "cat dog owl"),
        ("theatre", "theatre"),
        ("a-b", "ab"),
        ("“quoted”", "“quoted”"),  # only ASCII punctuation goes
        ("", ""),
    ],
)
def test_normalise(text, expected):
    assert normalise(text) == expected


def test_listed_items_are_data_and_not_run():
    assert listed_items("Final Answer: [__import__('os').getcwd()]") == []
    assert listed_items("[1, 2], [3]") == ["[1, 2]", "[3]"]


@pytest.mark.parametrize("task", tasks.TASKS)
def test_every_task_has_a_score(task):
    prediction = "Final Answer: ['right']" if task.startswith("loft_") else "right"
    assert score(task, prediction, ["right"]) == 1.0
    assert score(task, "wrong", ["right"]) == 0.0


def test_bad_input():
    with pytest.raises(ValueError, match=r"task must be one of niah_single_1, .*; got 'niah'"):
        score("niah", "", ["x"])
    with pytest.raises(ValueError, match="answers must hold at least one answer"):
        score("vt", "", [])
