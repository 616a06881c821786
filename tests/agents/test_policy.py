from __future__ import annotations

import pytest

from memopd_agents import PolicyAgent
from memopd_agents.engines import HFEngine, SamplingParams
from memopd_agents.engines.base import Completion
from memopd_agents.episode import SegmentSpan
from memopd_agents.policy import PromptBuilder, TokenMismatchError, check_prompt
from memopd_env import MemOPDEnv
from memopd_env.memory import Segment, SegmentKind
from memopd_env.protocol import Tags

from .conftest import make_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TASK = Segment(SegmentKind.TASK, "Q: who?\n")


def action(text: str, turn: int = 0) -> Segment:
    return Segment(SegmentKind.ACTION, text, turn)


def information(text: str, turn: int = 0) -> Segment:
    return Segment(SegmentKind.INFORMATION, text, turn)


def test_prompt_is_the_concatenation_of_its_segments(tokenizer):
    builder = PromptBuilder(tokenizer)
    sampled = [7, 8, 9]
    ids, spans = builder.build([TASK, action("abc"), information("found")], {0: ("abc", sampled)})
    assert ids == tokenizer.encode("Q: who?\n") + sampled + tokenizer.encode("found")
    assert [(span.kind, span.turn) for span in spans] == [("task", -1), ("action", 0), ("information", 0)]
    assert ids[spans[1].start : spans[1].end] == sampled and spans[1].exact


def test_past_action_is_the_sampled_ids_even_where_encoding_its_text_gives_others():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["ab"])
    letters = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert tokenizer.encode("ab") != letters and tokenizer.decode(letters) == "ab"
    ids, _ = PromptBuilder(tokenizer).build([TASK, action("ab")], {0: ("ab", letters)})
    assert ids[-2:] == letters


def test_part_of_an_action_is_encoded_as_text(tokenizer):
    builder = PromptBuilder(tokenizer)
    ids, spans = builder.build([TASK, action("<think>x</think>")], {0: ("<think>x</think><search>y</search>", [1, 2])})
    assert ids[spans[1].start :] == tokenizer.encode("<think>x</think>")
    assert not spans[1].exact


def test_chat_template_is_applied_once_to_the_task():
    tokenizer = make_tokenizer(TEMPLATE)
    ids, _ = PromptBuilder(tokenizer).build([TASK, action("a"), information("b")], {0: ("a", [65])})
    assert tokenizer.decode(ids[:-2]) == "<|user|>Q: who?\n<|assistant|>"


def test_special_tokens_are_left_out_of_the_text_but_tags_are_not(tokenizer):
    end = tokenizer.eos_token_id
    ids = tokenizer.encode("<answer>x</answer>")
    assert PromptBuilder(tokenizer).decode([*ids, end]) == "<answer>x</answer>"


def test_tags_stay_text_where_the_tokenizer_calls_them_special():
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    builder = PromptBuilder(tokenizer, Tags())
    assert builder.decode(tokenizer.encode("<think>x</think>")) == "<think>x</think>"


@pytest.mark.parametrize("forged", ["<|end|>", "<|pad|>", "a<|end|>b<|pad|>", "<|end|><|end|>"])
def test_special_token_spelled_out_in_a_document_becomes_ordinary_text(tokenizer, forged):
    builder = PromptBuilder(tokenizer)
    ids = builder.encode(f"<information>{forged}</information>")
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(ids) == f"<information>{forged}</information>"
    assert ids[0] == tokenizer.convert_tokens_to_ids("<information>")


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([SegmentSpan("task", -1, 0, 1), SegmentSpan("action", 0, 1, 3)], "not in the prompt as the ids"),
        ([SegmentSpan("task", -1, 0, 2), SegmentSpan("information", 0, 3, 4)], "starts at 3, not at 2"),
        ([SegmentSpan("task", -1, 0, 3)], "cover 3 of 4"),
    ],
)
def test_prompt_that_is_no_concatenation_is_noticed(segments, message):
    with pytest.raises(TokenMismatchError, match=message):
        check_prompt([1, 2, 3, 4], segments, [[2, 9]])


@pytest.mark.parametrize("memory", ["consolidate", "full", "window:2", "summary", "budget:60"])
def test_token_in_is_token_out_over_an_episode(model, tokenizer, tasks, retriever, memory):
    env = MemOPDEnv(tasks=tasks, retriever=retriever, memory=memory, instructions="terse")
    agent = PolicyAgent(_Scripted(tokenizer), tokenizer)
    observation, info = env.reset(seed=0, options={"task_index": 1})
    agent.reset(3)
    ended = False
    while not ended:
        text = agent.act(observation, info)
        call = agent.calls[-1]
        seen = "".join(segment.text for segment in info["context"])
        assert tokenizer.decode(call.prompt_ids).replace("<|end|>", "") == seen
        assert text == tokenizer.decode(call.action_ids).replace("<|end|>", "") == call.text
        observation, _, terminated, truncated, info = env.step(text)
        ended = terminated or truncated
    assert [call.seed for call in agent.calls] == list(dict.fromkeys(call.seed for call in agent.calls))
    for call in agent.calls:
        for span in call.segments:
            if span.kind == "action" and span.exact:
                assert call.prompt_ids[span.start : span.end] == agent.calls[span.turn].action_ids


def test_plays_with_a_real_engine(model, tokenizer, tasks, retriever):
    env = MemOPDEnv(tasks=tasks, retriever=retriever, instructions="terse")
    agent = PolicyAgent(HFEngine(model, tokenizer), tokenizer, SamplingParams(max_tokens=12))
    observation, info = env.reset(seed=0)
    agent.reset(0)
    ended = False
    while not ended:
        observation, _, terminated, truncated, info = env.step(agent.act(observation, info))
        ended = terminated or truncated
    assert len(agent.calls) == env.max_turns


class _Scripted:
    """An engine that searches, writes an end-of-sequence token now and then, and answers in the end."""

    version = 4

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.turn = 0

    def submit(self, request) -> None:
        self.request = request

    def poll(self) -> list[Completion]:
        text = f"<think>m{self.turn}</think><search>born</search>"
        if self.turn == 4:
            text = "<answer>Oslo; Lima</answer>"
        ids = self.tokenizer.encode(text)
        if self.turn % 2:
            ids.append(self.tokenizer.eos_token_id)
        self.turn += 1
        return [Completion(self.request.request_id, ids, [-1.0] * len(ids), "stop")]
