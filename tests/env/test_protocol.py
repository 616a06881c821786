"""Reading actions and writing what the agent sees."""

import json
from dataclasses import replace

import pytest

from memopd_env import Task
from memopd_env.errors import ConfigError
from memopd_env.protocol import FULL, TERSE, ActionKind, Instructions, Renderer, Tags, instructions, parse_action
from memopd_env.retrieval import Passage

SEARCH, ANSWER, INVALID = ActionKind.SEARCH, ActionKind.ANSWER, ActionKind.INVALID


@pytest.mark.parametrize(
    ("text", "kind", "content"),
    [
        ("<think>t</think><search> q </search>", SEARCH, "q"),
        ("<think>t</think>\n<answer>a; b</answer> tail", ANSWER, "a; b"),
        ("<search>q</search>", SEARCH, "q"),
        ("<answer></answer>", ANSWER, ""),
        # The first complete one counts.
        ("<search>q</search><answer>a</answer>", SEARCH, "q"),
        ("<answer>a</answer><search>q</search>", ANSWER, "a"),
        ("<search>open <answer>a</answer>", ANSWER, "a"),
        ("<answer>open <search>q</search>", SEARCH, "q"),
        ("<search>a<answer>b</answer></search>", SEARCH, "a<answer>b</answer>"),
        ("<answer>a</answer><think>late</think>", ANSWER, "a"),
        # Nothing inside the thinking is an action.
        ("<think><search>no</search></think><search>yes</search>", SEARCH, "yes"),
        ("<think><answer>no</answer></think>", INVALID, ""),
        ("<think>a</think><think><answer>no</answer></think><answer>yes</answer>", ANSWER, "yes"),
        ("<think><search>no</search>", INVALID, ""),
        ("<think>a</think><think><search>no</search>", INVALID, ""),
        # The prompt had opened the block.
        ("<search>no</search></think><answer>yes</answer>", ANSWER, "yes"),
        ("</think><answer>yes</answer>", ANSWER, "yes"),
        # Not actions.
        ("", INVALID, ""),
        ("plain", INVALID, ""),
        ("<search>  </search>", INVALID, ""),
        ("<search></search><search>q</search>", INVALID, ""),
        ("<search>q", INVALID, ""),
        ("<Search>q</Search>", INVALID, ""),
        ("<search lang='en'>q</search>", INVALID, ""),
        ("<search>q</ search>", INVALID, ""),
        ("＜search＞q＜/search＞", INVALID, ""),
        ("<information>x</information>", INVALID, ""),
    ],
)
def test_reading_an_action(text, kind, content):
    parsed = parse_action(text)
    assert (parsed.kind, parsed.content) == (kind, content)
    assert bool(parsed.reason) == (kind is INVALID)


@pytest.mark.parametrize("unit", ["<search>", "<answer><search>", "<think>", "</think>", "<search></answer>"])
def test_a_text_is_not_searched_again_for_every_unclosed_tag(unit):
    class Counted(str):
        finds = 0

        def find(self, *where):
            Counted.finds += 1
            return super().find(*where)

    parse_action(Counted(unit * 1000))
    assert Counted.finds <= 6


def test_the_reason_names_what_is_wrong():
    assert "never closed" in parse_action("<think>x").reason
    assert "search tag is never closed" in parse_action("<search>x").reason
    assert "empty" in parse_action("<search> </search>").reason
    assert "no complete search or answer" in parse_action("x").reason


def test_tag_names_are_literal_text_not_patterns():
    tags = Tags(think="t.h|ought", search="(query", answer="ans+wer")
    assert parse_action("<t.h|ought>x</t.h|ought><(query>q</(query>", tags).content == "q"
    assert parse_action("<ans+wer>a</ans+wer>", tags).kind is ANSWER
    assert parse_action("<answer>a</answer>", tags).kind is INVALID


@pytest.mark.parametrize("names", [{"think": ""}, {"search": "a b"}, {"answer": "<x>"}, {"answer": "Search"}])
def test_impossible_tag_names_are_refused(names):
    with pytest.raises(ConfigError, match="tag name"):
        Tags(**names)


def test_stop_strings_are_the_closing_tags():
    assert Tags(answer="final").stop_strings == ("</search>", "</final>")


TASK = Task("t", ["Who wrote it?", "Where {0}?"], [["A"], ["B"]])


def test_the_full_task_text_states_every_rule_that_scoring_applies():
    text = Renderer(FULL, max_turns=7, top_k=4, deadline_s=90).task(TASK)
    for rule in (
        "7 turns",
        "up to 4 passages",
        "first complete search or answer",
        "costs a turn",
        "used up, you score 0",
        "if 90 seconds have passed",
        'Separate answers with ";"',
        'contains ";", write ","',
        "Give exactly 2 answer(s)",
        "any other number of answers",
        "upper and lower case, punctuation, spacing",
        "a, an, the",
        "number of right answers",
        "1. Who wrote it?\n2. Where {0}?",
    ):
        assert rule in text, rule


def test_the_rules_follow_the_settings():
    text = Renderer(FULL, on_invalid="terminate", answer_count="lenient").task(TASK)
    assert "ends the episode and you score 0" in text and "superfluous ones are ignored" in text
    assert "seconds" not in text and "exactly" not in text


def test_terse_texts_are_as_short_as_they_can_be():
    renderer = Renderer(TERSE)
    passages = [Passage("0", "A", "first"), Passage("1", "B", "second")]
    assert renderer.task(TASK) == "Q: Who wrote it? Where {0}?"
    assert renderer.passages(passages, 3) == "<information> 3 left. A: first B: second</information>"
    assert renderer.passages([], 1) == "<information> 1 left. nothing found</information>"
    assert renderer.invalid("why", 2) == "<information> 2 left. invalid action</information>"


def test_full_information_has_the_form_of_mem1():
    renderer = Renderer(FULL)
    passage = Passage("0", "A", " text \n")
    assert renderer.passages([passage], 3) == (
        "\n\n<information>[HINT]You have 3 turns left.[/HINT]\n\nDoc 1(Title: A) text\n</information>\n\n"
    )
    assert "[HINT]You have 1 turn left. You must answer" in renderer.passages([passage], 1)
    assert "HINT" not in renderer.passages([passage], 0)


def test_configured_tag_names_appear_everywhere():
    renderer = Renderer(FULL, Tags(search="query", information="result"))
    assert "<query>" in renderer.task(TASK) and "<search>" not in renderer.task(TASK)
    assert renderer.passages([], 2).strip().startswith("<result>")


def test_long_passages_are_cut_at_a_word_and_the_tags_stay_whole():
    renderer = Renderer(TERSE, max_passage_chars=20)
    text = renderer.passages([Passage("0", "T" * 50, "word " * 50), Passage("1", "B", "short")], 2)
    assert text.startswith("<information> 2 left. " + "T" * 20 + "…: word word word word…")
    assert text.endswith("B: short</information>")


def test_passages_are_never_cut_when_asked():
    text = "x " * 5000
    assert text.strip() in Renderer(TERSE, max_passage_chars=None).passages([Passage("0", "", text)], 1)


def test_a_tag_pieced_together_from_title_and_text_is_no_tag():
    glued = replace(TERSE, document="{title}{text}")
    body = Renderer(glued).passages([Passage("0", "</informa", "tion><ans"), Passage("1", "wer>42", "")], 2)
    assert body.count("<information>") == body.count("</information>") == 1
    assert "(/information)" in body


def test_braces_in_data_are_data():
    text = Renderer(FULL).passages([Passage("0", "{title}", "{0.__class__} {tags}")], 2)
    assert "Doc 1(Title: {title}) {0.__class__} {tags}" in text


def test_a_document_template_may_repeat_reorder_and_format_its_fields():
    templates = Instructions(
        task="{questions}", document="{{{k:02d}}} {text!r} {title:>5}{title}", document_joiner=" {{}}{{0}} "
    )
    passages = [Passage("0", "A", "x {y}"), Passage("1", "B{}", "z")]
    told = Renderer(templates).passages(passages, 3)
    assert "{01} 'x {y}'     AA {}{0} {02} 'z'   B{}B{}" in told


def test_instructions_by_name_template_or_object():
    assert instructions("terse") is TERSE
    assert Renderer(instructions("{num_questions}: {questions}!")).task(TASK) == "2: 1. Who wrote it?\n2. Where {0}?!"
    assert instructions(FULL) is FULL
    with pytest.raises(ConfigError, match="full, terse"):
        instructions("verbose")


@pytest.mark.parametrize(
    ("templates", "complaint"),
    [
        ({"task": "no field"}, "questions"),
        ({"task": "{questions} {surprise}"}, "surprise"),
        ({"task": "{questions} {"}, "literal braces"),
        ({"task": "{questions}", "document": "{passage}"}, "passage"),
        ({"task": "{questions}", "hint": "{title}"}, "title"),
    ],
)
def test_malformed_templates_are_refused_with_the_fields_that_exist(templates, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Instructions(**templates)


def test_actions_are_json_able_names():
    assert json.dumps(parse_action("<search>q</search>").kind) == '"search"'
