"""Seeds are hashes of what they belong to: the same in every process, unrelated between neighbours."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Hash any number of parts, e.g. (run seed, episode, call), to one 63-bit seed; the same in every process."""
    text = "\x1f".join(f"str:{part}" if isinstance(part, str) else f"int:{int(part)}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def episode_seed(seed: int, number: int) -> int:
    """Return the seed of the ``number``-th episode of a run, small enough for ``env.reset``."""
    return derive_seed("episode", seed, number) >> 31
