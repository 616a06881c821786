"""How an answer is scored: per question, against the best of its accepted answers, after SQuAD normalisation.

The metrics are those of extractive question answering (Rajpurkar et al. 2016, arXiv 1606.05250): exact match, F1 over
the multiset of words, and, apart from both, whether an accepted answer is contained in what was said. An episode sums
them over its N questions. F1 is never below exact match, whatever the text.

One rule joins the answers of a task: they are split at ``;``. An accepted answer that itself holds a semicolon is
therefore also accepted with a comma or a space in its place, since no answer that was split can contain one.

The ``paper_*`` functions restate the published evaluation of MEM1 (arXiv 2506.15841) so that its numbers can be
compared; nothing else uses them.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from memopd_env.errors import ConfigError

SEPARATOR = ";"
ANSWER_COUNTS = ("strict", "lenient")

_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PUNCTUATION_TO_SPACE = str.maketrans(dict.fromkeys(string.punctuation, " "))
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class Score:
    """The score of one final answer.

    Attributes:
        em: Sum of per-question exact matches, 0..N.
        f1: Sum of per-question F1, 0..N.
        sub_em: Number of questions one of whose accepted answers is contained in what was said, 0..N.
        per_question: The same three before summing: ``{"em": [..], "f1": [..], "sub_em": [..]}``.
    """

    em: float
    f1: float
    sub_em: float
    per_question: dict[str, list[float]]


def normalize_answer(text: str) -> str:
    """Lower case, then drop ASCII punctuation and English articles, then collapse white space (SQuAD)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_DELETE_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Tell whether the normalised prediction equals a normalised accepted answer."""
    said = normalize_answer(prediction)
    return any(said == normalize_answer(answer) for answer in answers)


def f1_score(prediction: str, answers: Sequence[str]) -> float:
    """Return the best harmonic mean of word precision and recall over the accepted answers, 0 to 1.

    Words are counted with multiplicity. If either side has no words left after normalisation, they must be equal.
    """
    said = normalize_answer(prediction).split()
    return max((_f1(said, normalize_answer(answer).split()) for answer in answers), default=0.0)


def sub_exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Tell whether a normalised accepted answer is a substring of the normalised prediction (Search-R1's ``subem``).

    An accepted answer that normalises to nothing counts only if the prediction does too.
    """
    said = normalize_answer(prediction)
    return any(gold in said if gold else not said for gold in map(normalize_answer, answers))


def split_answers(text: str) -> list[str]:
    """Split the text between the answer tags into the answers it gives; always at least one, possibly blank."""
    return [part.strip() for part in text.split(SEPARATOR)]


def score_answers(text: str | None, answers: Sequence[Sequence[str]], answer_count: str = "strict") -> Score:
    """Score the text between the answer tags of the action that ended an episode.

    Args:
        text: ``a1; a2; ...``, or None when the episode ended without an answer, which scores 0.
        answers: For each of the N questions its accepted answers.
        answer_count: ``strict``: any other number of answers than N scores 0 on every question. ``lenient``: missing
            answers score 0, superfluous ones are ignored.

    Raises:
        ConfigError: If ``answer_count`` is neither.
    """
    if answer_count not in ANSWER_COUNTS:
        raise ConfigError(f"answer_count is {answer_count!r}; use one of {', '.join(ANSWER_COUNTS)}")
    given = [] if text is None else split_answers(text)
    if answer_count == "strict" and len(given) != len(answers):
        given = []
    em, f1, sub_em = [], [], []
    for number, accepted in enumerate(answers):
        said = given[number] if number < len(given) else ""
        # Silence is never an answer, not even to a question whose answer is one of the words that normalisation drops.
        golds = accepted_forms(accepted) if said else ()
        em.append(float(exact_match(said, golds)))
        f1.append(f1_score(said, golds))
        sub_em.append(float(sub_exact_match(said, golds)))
    return Score(sum(em), sum(f1), sum(sub_em), {"em": em, "f1": f1, "sub_em": sub_em})


def accepted_forms(answers: Sequence[str]) -> tuple[str, ...]:
    """Add to answers that hold the separator the form without it that an agent is able to give."""
    if not any(SEPARATOR in answer for answer in answers):
        return tuple(answers)
    return (*answers, *(sayable(answer) for answer in answers if SEPARATOR in answer))


def sayable(answer: str) -> str:
    """Write an answer without the separator: ``AC;DC`` becomes ``AC, DC``."""
    return ", ".join(part.strip() for part in answer.split(SEPARATOR) if part.strip())


def paper_f1_score(prediction: str, answers: Sequence[str]) -> float:
    """F1 as MEM1's evaluation computes it: over sets of words, punctuation replaced by spaces, articles kept."""
    said = set(_paper_words(prediction))
    best = 0.0
    for answer in answers:
        gold = set(_paper_words(answer))
        common = len(said & gold)
        if common:
            best = max(best, 2 * common / (len(said) + len(gold)))
    return best


def paper_exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Exact match as MEM1's evaluation computes it: punctuation replaced by spaces, articles kept."""
    said = _paper_words(prediction)
    return any(said == _paper_words(answer) for answer in answers)


def paper_score_answers(text: str | None, answers: Sequence[Sequence[str]]) -> Score:
    """MEM1's published evaluation of one episode: split at ``;``, the count must equal N or everything is 0."""
    given = [] if text is None else split_answers(text)
    if len(given) != len(answers):
        given = [""] * len(answers)
    pairs = list(zip(given, answers, strict=True))
    em = [float(bool(said) and paper_exact_match(said, golds)) for said, golds in pairs]
    f1 = [paper_f1_score(said, golds) for said, golds in pairs]
    sub_em = [float(bool(said) and sub_exact_match(said, golds)) for said, golds in pairs]
    return Score(sum(em), sum(f1), sum(sub_em), {"em": em, "f1": f1, "sub_em": sub_em})


def _f1(said: list[str], gold: list[str]) -> float:
    if not said or not gold:
        return float(said == gold)
    common = sum((Counter(said) & Counter(gold)).values())
    if not common:
        return 0.0
    # 2 c / (|said| + |gold|) is the harmonic mean of c/|said| and c/|gold|, and exactly 1.0 for equal lists.
    return 2 * common / (len(said) + len(gold))


def _paper_words(text: str) -> list[str]:
    return text.lower().translate(_PUNCTUATION_TO_SPACE).split()
