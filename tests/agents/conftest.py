"""A byte-level tokenizer, a tiny random Qwen2, and a handful of passages and tasks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from memopd_env import Task
from memopd_env.retrieval import Passage, SparseRetriever

TAGS = [f"<{end}{name}>" for name in ("think", "search", "answer", "information") for end in ("", "/")]


def make_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per byte and per protocol tag, so that any text can be spelled and any id decoded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.chat_template = chat_template
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerBase, seed: int = 0, **changes: object) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    options = dict(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    config = Qwen2Config(**{**options, **changes})
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    return make_model(tokenizer)


PEOPLE = ("Ada", "Bo", "Cleo", "Dan", "Eve", "Finn")
TOWNS = ("Rome", "Oslo", "Lima", "Kyiv", "Bonn", "Cork")


@pytest.fixture(scope="session")
def passages() -> list[Passage]:
    return [
        Passage(str(row), person, f"{person} was born in {town}.")
        for row, (person, town) in enumerate(zip(PEOPLE, TOWNS, strict=True))
    ]


@pytest.fixture(scope="session")
def retriever(passages: list[Passage]) -> SparseRetriever:
    return SparseRetriever.from_passages(passages)


@pytest.fixture(scope="session")
def tasks() -> list[Task]:
    people = list(zip(PEOPLE, TOWNS, strict=True))
    return [
        Task(
            id=f"t{number}",
            questions=[f"Where was {first} born?", f"Where was {second} born?"],
            answers=[[first_town], [second_town]],
            entities=[[first], [second]],
        )
        for number, ((first, first_town), (second, second_town)) in enumerate(pairwise(people))
    ]
