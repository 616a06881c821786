"""Token in, token out: the prompt of a call is a concatenation of ids that are never encoded twice.

A context is a tuple of segments with known origins, and each origin has one way to become ids: the task goes once
through the chat template, information is encoded once, and a past action contributes the very ids that were sampled.
Only a piece of an action that a memory policy cut out of the whole has to be encoded as text. Text is decoded from
ids, never the other way round, so what the trainer scores later is exactly what the model saw and wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from memopd_agents.engines.base import Completion, Engine, Request, SamplingParams
from memopd_agents.episode import Call, SegmentSpan
from memopd_agents.seeds import derive_seed
from memopd_env.errors import MemOPDError
from memopd_env.memory import Segment, SegmentKind
from memopd_env.protocol import Tags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CACHED_TEXTS = 4096


class TokenMismatchError(MemOPDError, AssertionError):
    """A prompt is not the concatenation of the ids it should consist of; this is a bug, not a user's mistake."""


class PromptBuilder:
    """Turns contexts into ids and sampled ids into text, for one tokenizer.

    Args:
        tokenizer: Of the policy.
        tags: Protocol tags; their tokens are text even where the tokenizer calls them special.
        chat_template: Further arguments of ``apply_chat_template``, e.g. ``{"enable_thinking": True}``.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tags: Tags | None = None,
        chat_template: Mapping[str, Any] | None = None,
    ) -> None:
        tags = tags or Tags()
        marks = {mark for name in tags.names for mark in (f"<{name}>", f"</{name}>")}
        self.tokenizer = tokenizer
        self._chat_template = dict(chat_template or {})
        specials = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        self._special = {id: token for id, token in specials if token not in marks}
        # Longest first, so that a special token that contains another one is found whole.
        names = sorted(self._special.values(), key=len, reverse=True)
        self._forged = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self.encode: Callable[[str], tuple[int, ...]] = lru_cache(_CACHED_TEXTS)(self._encode)
        self.encode_task: Callable[[str], tuple[int, ...]] = lru_cache(_CACHED_TEXTS)(self._encode_task)

    def build(
        self, context: Sequence[Segment], actions: Mapping[int, tuple[str, Sequence[int]]]
    ) -> tuple[list[int], list[SegmentSpan]]:
        """Return the prompt ids of a call and where each segment lies in them.

        Args:
            context: What the call sees, oldest first.
            actions: For each past turn the text that the environment was given and the ids it was decoded from.
        """
        ids: list[int] = []
        spans: list[SegmentSpan] = []
        for segment in context:
            text, sampled = actions.get(segment.turn, (None, ()))
            whole = segment.kind is SegmentKind.ACTION and text == segment.text
            if segment.kind is SegmentKind.TASK:
                piece: Sequence[int] = self.encode_task(segment.text)
            else:
                piece = sampled if whole else self.encode(segment.text)
            exact = whole or segment.kind is not SegmentKind.ACTION
            spans.append(SegmentSpan(segment.kind.value, segment.turn, len(ids), len(ids) + len(piece), exact))
            ids.extend(piece)
        return ids, spans

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids; end-of-sequence and other special tokens are left out, tags are not."""
        kept = [id for id in ids if id not in self._special]
        text = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _encode_task(self, text: str) -> tuple[int, ...]:
        if not self.tokenizer.chat_template:
            return self.encode(text)
        ids = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **self._chat_template,
        )
        return tuple(cast(list[int], ids))

    def _encode(self, text: str) -> tuple[int, ...]:
        """Encode data; a special token spelled out in it, e.g. by a document, becomes ordinary text."""
        if self._forged is None or not self._forged.search(text):
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        ids: list[int] = []
        for number, part in enumerate(self._forged.split(text)):
            if part:
                forged = number % 2 == 1
                ids += self.tokenizer.encode(part, add_special_tokens=False, split_special_tokens=forged)
        return tuple(ids)


class PolicyAgent:
    """Plays with a model, token by token exactly.

    ``act`` serves a single environment. A rollout over many uses the two halves: :meth:`prompt` makes the request of
    the next call, :meth:`record` takes its completion and gives back the action text.

    Args:
        engine: Where tokens come from.
        tokenizer: Of the policy.
        sampling: How to sample; stop strings default to the closing tags of search and answer.
        tags: Protocol tags, as in the environment.
        seed: Seed of the next episode's calls; ``reset`` replaces it.
        builder: Shared by many agents with one tokenizer; made from ``tokenizer`` if absent.

    Attributes:
        calls: What was played since the last ``reset``.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams | None = None,
        *,
        tags: Tags | None = None,
        seed: int = 0,
        builder: PromptBuilder | None = None,
    ) -> None:
        tags = tags or Tags()
        sampling = sampling or SamplingParams()
        self.engine = engine
        self.builder = builder or PromptBuilder(tokenizer, tags)
        self.sampling = sampling if sampling.stop else replace(sampling, stop=tags.stop_strings)
        self.reset(seed)

    def reset(self, seed: int | None = None) -> None:
        """Forget the episode; the calls of the next one are seeded from ``seed``."""
        self.seed = 0 if seed is None else seed
        self.calls: list[Call] = []
        self._actions: dict[int, tuple[str, Sequence[int]]] = {}
        self._next: tuple[Request, list[SegmentSpan]] | None = None

    def act(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return the next action for the context in ``info["context"]``; the observation itself is not used."""
        self.engine.submit(self.prompt(info))
        completions = self.engine.poll()
        return self.record(completions[0])

    def prompt(self, info: Mapping[str, Any], request_id: str = "") -> Request:
        """Return the request of the next call.

        Raises:
            TokenMismatchError: If the prompt is not the concatenation of its segments' ids.
        """
        ids, spans = self.builder.build(info["context"], self._actions)
        check_prompt(ids, spans, [call.action_ids for call in self.calls])
        request = Request(ids, self.sampling, derive_seed(self.seed, len(self.calls)), request_id)
        self._next = request, spans
        return request

    def record(self, completion: Completion) -> str:
        """Take the completion of the request made last and return the action text."""
        assert self._next is not None, "record() follows prompt()"
        request, spans = self._next
        self._next = None
        text = self.builder.decode(completion.action_ids)
        self._actions[len(self.calls)] = text, completion.action_ids
        self.calls.append(
            Call(
                prompt_ids=request.prompt_ids,
                action_ids=completion.action_ids,
                logprobs=completion.logprobs,
                segments=spans,
                finish_reason=completion.finish_reason,
                text=text,
                seed=request.seed,
                policy_version=getattr(self.engine, "version", 0),
            )
        )
        return text


def check_prompt(prompt_ids: Sequence[int], segments: Sequence[SegmentSpan], actions: Sequence[Sequence[int]]) -> None:
    """Check that the segments tile the prompt and that every whole past action appears as the ids that were sampled.

    Raises:
        TokenMismatchError: Otherwise; names the segment.
    """
    position = 0
    for segment in segments:
        if segment.start != position:
            raise TokenMismatchError(
                f"{segment.kind} of turn {segment.turn} starts at {segment.start}, not at {position}"
            )
        position = segment.end
        past = segment.kind == SegmentKind.ACTION and segment.exact
        if past and list(prompt_ids[segment.start : segment.end]) != list(actions[segment.turn]):
            raise TokenMismatchError(f"action of turn {segment.turn} is not in the prompt as the ids that were sampled")
    if position != len(prompt_ids):
        raise TokenMismatchError(f"the segments cover {position} of {len(prompt_ids)} prompt ids")
