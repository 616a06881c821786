"""Small models made on the spot: a tokenizer that can spell anything and a Qwen2-style decoder with random weights.

They exist so that the whole loop runs on a CPU without a download. Two kinds of tokenizer: one from explicit pieces, for
the terse built-in world, whose syllables are its natural tokens (a name unseen in training is still two known tokens);
one learned from a corpus by byte-level BPE. Both can encode any text (bytes are in the vocabulary), so no document and no
agent can make them fail, and both write a protocol tag as one token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from memopd_env.errors import ConfigError
from memopd_env.protocol import Tags
from memopd_env.tasks import world

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = "{% for message in messages %}" + START + "{{ message['content'] }}" + END + "{% endfor %}"


def pieces_tokenizer(pieces: Iterable[str], tags: Tags | None = None) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are the given pieces; whatever they cannot spell is spelled in bytes.

    Args:
        pieces: Texts that shall be one token each; a leading space belongs to the piece (``" mother"``).
        tags: Protocol tags, one token each.

    Returns:
        A tokenizer with a chat template, ``pad_token`` and ``eos_token``.
    """
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [piece.replace(" ", "▁") for piece in dict.fromkeys(pieces)]
    vocabulary = [("<|unk|>", 0.0), *((byte, -30.0) for byte in spelled), *((word, -1.0) for word in words)]
    core = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    # Words are cut where a space begins, so that a piece never straddles two words.
    core.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _finish(core, tags)


def terse_world_tokenizer(tags: Tags | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer of the terse built-in world: syllables, relation words and marks (about 600 tokens)."""
    pieces = [f" {start}" for start in world.STARTS] + list(world.ENDS)
    pieces += [f" {start}" for start in world.VALUE_STARTS] + list(world.VALUE_ENDS)
    pieces += [f" {relation}" for relation in world.TERSE_RELATIONS]
    pieces += [*(f" {digit}" for digit in range(10)), *map(str, range(10))]
    pieces += ["Q:", " left.", " ?", "?", ";", ",", ".", ":", "\n", " ", " unknown", " nothing", " found", " invalid", " action"]
    return pieces_tokenizer(pieces, tags)


def learned_tokenizer(texts: Iterable[str], vocab_size: int = 4096, tags: Tags | None = None) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE tokenizer; digits stay single, so numbers are copied digit by digit.

    Args:
        texts: What to learn from; streamed.
        vocab_size: Number of tokens, tags and specials not counted; at least 256.
        tags: Protocol tags, one token each.
    """
    if vocab_size < 256:
        raise ConfigError(f"a byte-level vocabulary has at least 256 tokens, not {vocab_size}")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    return _finish(core, tags)


def _finish(core: Tokenizer, tags: Tags | None) -> PreTrainedTokenizerFast:
    tags = tags or Tags()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END)
    tokenizer.add_special_tokens({"additional_special_tokens": [START]})
    names = (tags.think, tags.search, tags.answer, tags.information)
    marks = [AddedToken(mark, normalized=False) for name in names for mark in (f"<{name}>", f"</{name}>")]
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
    config = Qwen2Config(
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
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).float()
