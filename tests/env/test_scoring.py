"""Scoring: SQuAD metrics, how answers are split, and what the published evaluation did differently."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopd_env.errors import ConfigError
from memopd_env.scoring import (
    exact_match,
    f1_score,
    normalize_answer,
    paper_exact_match,
    paper_f1_score,
    paper_score_answers,
    sayable,
    score_answers,
    split_answers,
    sub_exact_match,
)

text = st.text(st.characters(exclude_categories=()), max_size=30)


@pytest.mark.parametrize(
    ("given_text", "normal"),
    [
        ("The  Eiffel Tower!", "eiffel tower"),
        ("an apple a day", "apple day"),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),
        ("\tBeyoncé\n", "beyoncé"),
        ("the the", ""),
        ("東京", "東京"),
        ("", ""),
    ],
)
def test_normalisation_drops_case_punctuation_articles_and_spacing(given_text, normal):
    assert normalize_answer(given_text) == normal


def test_exact_match_takes_the_best_alias():
    assert exact_match("the USA", ["America", "U.S.A."])
    assert not exact_match("USA and more", ["U.S.A."])


def test_f1_counts_words_with_multiplicity():
    assert f1_score("new york new york", ["new york"]) == pytest.approx(2 * 0.5 * 1 / 1.5)
    assert f1_score("york new", ["new york"]) == 1.0
    assert f1_score("paris", ["london"]) == 0.0


def test_sub_exact_match_finds_the_answer_inside_a_sentence():
    assert sub_exact_match("It is Paris, of course", ["paris"])
    assert not sub_exact_match("Lyon", ["paris"])


def test_an_accepted_answer_without_words_is_not_contained_in_everything():
    assert not sub_exact_match("Lyon", ["The"])


@given(text, st.lists(text, min_size=1, max_size=4))
def test_f1_and_sub_em_are_never_below_exact_match(prediction, answers):
    em, f1, sub_em = (metric(prediction, answers) for metric in (exact_match, f1_score, sub_exact_match))
    assert 0.0 <= float(em) <= f1 <= 1.0
    assert em <= sub_em


@given(text)
def test_a_text_matches_itself(answer):
    assert exact_match(answer, [answer])
    assert f1_score(answer, [answer]) == 1.0


@given(text, st.lists(text, min_size=1, max_size=4))
def test_more_aliases_never_lower_a_score(prediction, answers):
    assert f1_score(prediction, answers) >= f1_score(prediction, answers[:1])


def test_no_accepted_answer_scores_nothing():
    assert (exact_match("x", []), f1_score("x", []), sub_exact_match("x", [])) == (False, 0.0, False)


ANSWERS = [["Paris"], ["Madrid", "Madrid city"]]


def test_answers_are_scored_in_the_order_of_the_questions():
    assert score_answers("Paris; Madrid", ANSWERS).em == 2
    assert score_answers("Madrid; Paris", ANSWERS).em == 0


@pytest.mark.parametrize("said", ["Paris", "Paris; Madrid; Rome", "Paris; Madrid;", "", None])
def test_strict_gives_nothing_for_a_wrong_number_of_answers(said):
    score = score_answers(said, ANSWERS)
    assert (score.em, score.f1, score.sub_em) == (0, 0, 0)
    assert score.per_question == {"em": [0, 0], "f1": [0, 0], "sub_em": [0, 0]}


def test_lenient_pads_and_cuts():
    assert score_answers("Paris", ANSWERS, "lenient").per_question["em"] == [1, 0]
    assert score_answers("Paris; Madrid; Rome", ANSWERS, "lenient").em == 2
    assert score_answers(None, ANSWERS, "lenient").f1 == 0


def test_an_unknown_answer_count_is_an_error_that_names_the_choices():
    with pytest.raises(ConfigError, match="strict, lenient"):
        score_answers("a", [["a"]], "loose")


def test_silence_is_no_answer_even_where_normalisation_leaves_nothing_of_the_accepted_one():
    assert score_answers("; b", [["The The"], ["b"]]).per_question["em"] == [0, 1]
    assert score_answers("The The; b", [["The The"], ["b"]]).em == 2


@pytest.mark.parametrize(("gold", "said"), [("AC;DC", "AC, DC"), ("AC;DC", "AC DC"), ("one; two", "one, two")])
def test_an_accepted_answer_with_the_separator_can_be_given(gold, said):
    assert score_answers(f"{said}; x", [[gold], ["x"]]).em == 2


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5))
def test_the_sayable_form_of_every_answer_scores_full_marks(golds):
    answers = [[gold] for gold in golds if sayable(gold).strip()]
    said = "; ".join(sayable(gold) for [gold] in answers)
    if answers:
        assert score_answers(said, answers).em == len(answers)


@given(text, st.lists(st.lists(text, min_size=1, max_size=3), min_size=1, max_size=5), st.booleans())
def test_sums_agree_with_the_questions_and_stay_in_range(said, answers, strict):
    score = score_answers(said, answers, "strict" if strict else "lenient")
    assert score.em == sum(score.per_question["em"]) <= score.f1 == sum(score.per_question["f1"]) <= len(answers)
    assert all(len(values) == len(answers) for values in score.per_question.values())


def test_split_answers_trims_and_keeps_blanks():
    assert split_answers(" a ;; b") == ["a", "", "b"]


def test_the_paper_keeps_articles_and_compares_sets_of_words():
    assert not paper_exact_match("the cat", ["cat"])
    assert paper_f1_score("new york new york", ["new york"]) == 1.0
    assert f1_score("new york new york", ["new york"]) < 1.0


def test_the_paper_scores_nothing_for_a_wrong_number_of_answers():
    assert paper_score_answers("Paris", ANSWERS).f1 == 0
    assert paper_score_answers("Paris; Madrid", ANSWERS).em == 2
    assert paper_score_answers(None, ANSWERS).em == 0
