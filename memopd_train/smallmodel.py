"""Small models made on the spot: a tokenizer that can spell anything and a Qwen2-style decoder with random weights.

They exist so that the whole loop runs on a CPU without a download. Two kinds of tokenizer: one from explicit pieces,
for the terse built-in world, whose syllables are its natural tokens (a name unseen in training is still two known
tokens); one learned from a corpus by byte-level BPE. Both can encode any text (bytes are in the vocabulary), so no
document and no agent can make them fail, and both write a protocol tag as one token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from memopd_env.errors import ConfigError
from memopd_env.protocol import Tags
from memopd_env.tasks import world

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = "{% for message in messages %}" + START + "{{ message['content'] }}" + END + "{% endfor %}"


def pieces_tokenizer(pieces: Iterable[str], tags: Tags | None = None) -> Qwen2Tokenizer:
    """Make a tokenizer whose tokens are the given pieces; whatever they cannot spell is spelled in bytes.

    The pieces become the merges of a byte-level BPE, so the tokenizer is an ordinary Qwen2 one and every tool that
    loads a Qwen2 model's tokenizer reads it right. Earlier pieces win where two could overlap.

    Args:
        pieces: Texts that shall be one token each; a leading space belongs to the piece (``" mother"``).
        tags: Protocol tags, one token each.

    Returns:
        A tokenizer with a chat template, ``pad_token`` and ``eos_token``.
    """
    merges: dict[tuple[str, str], int] = {}
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for piece in pieces:
        symbols = _merge(list(_bytes(piece)), merges)
        while len(symbols) > 1:
            merges[symbols[0], symbols[1]] = len(merges)
            symbols[:2] = [symbols[0] + symbols[1]]
            vocabulary.setdefault(symbols[0], len(vocabulary))
    return _finish(vocabulary, list(merges), tags)


def _bytes(text: str) -> str:
    """Spell a text in the characters that byte-level BPE has for bytes."""
    return "".join(
        part for part, _ in pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    )


def _merge(symbols: list[str], merges: Mapping[tuple[str, str], int]) -> list[str]:
    """Apply byte-pair merges, lowest rank first, as the tokenizer will."""
    while len(symbols) > 1:
        ranks = [merges.get(pair, len(merges)) for pair in pairwise(symbols)]
        place = min(range(len(ranks)), key=ranks.__getitem__)
        if ranks[place] == len(merges):
            break
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    return symbols


def terse_world_tokenizer(tags: Tags | None = None) -> Qwen2Tokenizer:
    """Return the tokenizer of the terse built-in world: syllables, relation words and marks (about 650 tokens)."""
    pieces = [f" {start}" for start in (*world.STARTS, *world.VALUE_STARTS)]
    pieces += [*world.ENDS, *world.VALUE_ENDS]
    pieces += [
        f" {word}" for word in (*world.TERSE_RELATIONS, "left", "unknown", "nothing", "found", "invalid", "action", "?")
    ]
    return pieces_tokenizer(pieces, tags)


def learned_tokenizer(texts: Iterable[str], vocab_size: int = 2048, tags: Tags | None = None) -> Qwen2Tokenizer:
    """Learn a byte-level BPE tokenizer; digits stay single, so numbers are copied digit by digit.

    Args:
        texts: What to learn from; streamed.
        vocab_size: Number of tokens, tags and specials not counted; at least 256.
        tags: Protocol tags, one token each.
    """
    if vocab_size < 256:
        raise ConfigError(f"a byte-level vocabulary has at least 256 tokens, not {vocab_size}")
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = _finish({}, [], tags).backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    learned = json.loads(core.to_str())["model"]
    return _finish(learned["vocab"], [tuple(pair) for pair in learned["merges"]], tags)


def _finish(vocabulary: dict[str, int], merges: list[tuple[str, str]], tags: Tags | None) -> Qwen2Tokenizer:
    tags = tags or Tags()
    pairs: Any = merges  # its annotation says strings, its code takes pairs
    specials: Any = {"unk_token": None, "pad_token": PAD, "eos_token": END, "additional_special_tokens": [START]}
    tokenizer = Qwen2Tokenizer(vocabulary, pairs, **specials)
    marks: Any = [AddedToken(f"<{slash}{name}>", normalized=False) for name in tags.names for slash in ("", "/")]
    tokenizer.add_tokens(marks)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@dataclass(frozen=True)
class ModelShape:
    """Size of a small model.

    Attributes:
        layers: Decoder layers.
        width: Hidden size.
        heads: Attention heads; ``width / heads`` should be at least 32, the least that vLLM takes.
        window: Longest call in tokens.
    """

    layers: int = 2
    width: int = 128
    heads: int = 4
    window: int = 2048


def new_model(tokenizer: PreTrainedTokenizerBase, shape: ModelShape | None = None, seed: int = 0) -> Qwen2ForCausalLM:
    """Make a Qwen2-style decoder with random weights for a tokenizer; heads are untied, weights are fp32.

    Args:
        tokenizer: Its length is the vocabulary size.
        shape: Size; the default has about half a million parameters.
        seed: Seed of the weights.
    """
    shape = shape or ModelShape()
    if shape.width % shape.heads:
        raise ConfigError(f"width {shape.width} is not divisible by {shape.heads} heads")
    options: dict[str, Any] = dict(
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        intermediate_size=3 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.window,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(**options)).float()
        # A token's own identity must not drown in what the first layer adds, or matching it later is hard to learn.
        embeddings: Any = model.get_input_embeddings()
        torch.nn.init.normal_(embeddings.weight, std=0.5)
        _look_back(model, heads=max(1, shape.heads // 2))
        return model


def _look_back(model: Qwen2ForCausalLM, heads: int, sharpness: float = 6.4, planes: int = 6) -> None:
    """Set the first layer's query and key biases so that some heads begin by attending to the previous token.

    Copying rests on such heads (arXiv 2209.11895), and finding them by gradient alone is most of the time that a small
    model needs before it reads. With rotary embeddings the score of a query at ``m`` and a key at ``n`` is a sum of
    ``cos((m - n) * frequency + phase)``; a phase of ``-frequency`` in the fastest planes puts its peak at
    ``m - n = 1``.
    """
    config: Any = model.config
    attention: Any = model.model.layers[0].self_attn
    size = config.hidden_size // config.num_attention_heads
    base = config.rope_parameters["rope_theta"]
    with torch.no_grad():
        for plane in range(min(planes, size // 2)):
            frequency = base ** (-2 * plane / size)
            for first in range(0, heads * size, size):
                attention.k_proj.bias[first + plane] = sharpness
                attention.q_proj.bias[first + plane] = sharpness * math.cos(frequency)
                attention.q_proj.bias[first + plane + size // 2] = -sharpness * math.sin(frequency)
