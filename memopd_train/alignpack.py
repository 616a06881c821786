"""AlignPack: many calls in one row, each token computed once, each call seeing exactly what it saw when it was sampled.

The one idea: every call is a path in a prefix trie. Sort the calls, and the trie is already there: each call adds to
the row only what it does not share with the call before it, and the row *is* the depth-first walk. A node's position is
its depth, and ``subtree_end[i]`` is the first row position after the subtree of node i. Then visibility is one line:

    query i sees key j  <=>  j <= i < subtree_end[j]

Calls that share a prefix (call 0 inside call 1, all rollouts of one task) share its computation, different tasks lie
side by side unseen, an append-only history becomes the usual causal row. No memory policy is special.

Losses belong to (call, token) pairs, not to row positions: ``action_index[a]`` is the row position whose hidden state
predicts the sampled token ``action_ids[a]``. Copies of an action carried into later contexts are only keys to look at.

Axes: T = tokens of the row, A = sampled tokens of the pack (order: episode, call, token).
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from memopd_agents.episode import Episode
from memopd_env.errors import MemOPDError

FLEX_BLOCK = 128
"""Row positions in one tile of a FlexAttention block mask."""


class PackError(MemOPDError, ValueError):
    """Episodes cannot be packed, or a pack lacks the structure a back end needs; the message names episode and call."""


@dataclass(frozen=True)
class Pack:
    """One row of calls for one forward pass. All tensors are 1-D int64.

    Attributes:
        input_ids: (T,) token ids in depth-first order.
        position_ids: (T,) depth of each node: its position in its own call.
        subtree_end: (T,) first row position after the subtree of each node.
        action_index: (A,) row position whose hidden state predicts ``action_ids[a]``.
        action_ids: (A,) the sampled tokens.
        call_index: (A,) number of the call within its episode.
        episode_index: (A,) number of the episode in the argument of :func:`pack`.
        flat_index: (A,) place of each sampled token in the whole batch, ordered by episode, call, token, so that
            ``advantages[pack.flat_index]`` fits this pack. Counts 0..A-1 when built by hand.
    """

    input_ids: Tensor
    position_ids: Tensor
    subtree_end: Tensor
    action_index: Tensor
    action_ids: Tensor
    call_index: Tensor
    episode_index: Tensor
    flat_index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def __post_init__(self) -> None:
        if len(self.flat_index) != len(self.action_ids):
            object.__setattr__(self, "flat_index", torch.arange(len(self.action_ids), device=self.action_ids.device))

    @property
    def num_tokens(self) -> int:
        """T: tokens that are computed."""
        return len(self.input_ids)

    @property
    def num_actions(self) -> int:
        """A: sampled tokens, each of them once in the loss."""
        return len(self.action_ids)

    @property
    def raw_tokens(self) -> int:
        """Tokens of the pack's calls without sharing: the sum over calls of prompt plus action."""
        if self.num_actions == 0:
            return 0
        key = torch.stack([self.episode_index, self.call_index])
        is_last = torch.ones(self.num_actions, dtype=torch.bool, device=key.device)
        is_last[:-1] = (key[:, 1:] != key[:, :-1]).any(0)
        return int((self.position_ids[self.action_index[is_last]] + 2).sum())

    def to(self, device: torch.device | str) -> Pack:
        """Return the pack with all tensors on ``device``."""
        return Pack(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})

    def attention_mask(self) -> Tensor:
        """Return the (T, T) boolean mask: True where the query row may see the key column."""
        position = torch.arange(self.num_tokens, device=self.input_ids.device)
        return (position[None, :] <= position[:, None]) & (position[:, None] < self.subtree_end[None, :])

    def block_mask(self) -> BlockMask:
        """Return the FlexAttention block mask of the same visibility.

        Which tiles are empty, partial or full follows from the extremes of ``subtree_end`` per tile, so no (T, T) mask
        is
        built: a key tile left of a query tile is partly visible if its longest subtree reaches into the query tile, and
        wholly visible if its shortest one reaches past it. The tile on the diagonal is always partial.
        """
        end, device = self.subtree_end, self.subtree_end.device
        tiles = -(-self.num_tokens // FLEX_BLOCK)
        padding = tiles * FLEX_BLOCK - self.num_tokens
        longest = torch.nn.functional.pad(end, (0, padding), value=0).view(tiles, FLEX_BLOCK).amax(1)
        shortest = torch.nn.functional.pad(end, (0, padding), value=0).view(tiles, FLEX_BLOCK).amin(1)
        tile = torch.arange(tiles, device=device)
        query_start, query_end = tile * FLEX_BLOCK, ((tile + 1) * FLEX_BLOCK).clamp(max=self.num_tokens)
        left = tile[None, :] < tile[:, None]
        full = left & (shortest[None, :] >= query_end[:, None])
        seen = (left & (longest[None, :] > query_start[:, None])) | torch.eye(tiles, dtype=torch.bool, device=device)

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < end[key])

        return BlockMask.from_kv_blocks(
            *_ragged(seen & ~full),
            *_ragged(full),
            BLOCK_SIZE=FLEX_BLOCK,
            mask_mod=visible,
            seq_lengths=(self.num_tokens, self.num_tokens),
        )

    def runs(self) -> list[Tensor]:
        """Cut the row where the walk turns back, and return what each run sees: its ancestors, then itself.

        Within a run every node is a child of the one before, so its attention is plainly causal, with all ancestors
        before the first query. Without branches the runs are just the calls.

        Returns:
            For each run of n row positions under a ancestors, the (a + n,) row positions from the root to its end, on
            the CPU.
        """
        depth = self.position_ids.tolist()
        starts = [i for i in range(len(depth)) if i == 0 or depth[i] != depth[i - 1] + 1]
        path, seen = torch.empty(max(depth, default=0) + 1, dtype=torch.int64), []
        for start, end in zip(starts, [*starts[1:], len(depth)], strict=True):
            bottom = depth[end - 1] + 1
            path[depth[start] : bottom] = torch.arange(start, end)
            seen.append(path[:bottom].clone())
        return seen

    def padded(self, num_tokens: int) -> Pack:
        """Return the pack lengthened to ``num_tokens`` by tokens that see, and are seen by, only themselves."""
        extra = num_tokens - self.num_tokens
        if extra < 0:
            raise PackError(f"cannot pad {self.num_tokens} tokens to {num_tokens}: choose a larger length")
        zeros = self.input_ids.new_zeros(extra)
        itself = torch.arange(self.num_tokens, num_tokens, device=self.input_ids.device)
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, zeros]),
            position_ids=torch.cat([self.position_ids, zeros]),
            subtree_end=torch.cat([self.subtree_end, itself + 1]),
        )


@dataclass(frozen=True)
class SampledTokens:
    """The A axis of a whole batch, in its global order: episode, call, token.

    Attributes:
        action_ids: (A,) int64.
        call_index: (A,) int64, call within the episode.
        episode_index: (A,) int64.
        logprobs: (A,) float32 log-probabilities recorded by the engine; None if any call has none.
    """

    action_ids: Tensor
    call_index: Tensor
    episode_index: Tensor
    logprobs: Tensor | None


class _Path(NamedTuple):
    """One call as a path from the root: its ids and where its sampled tokens stand in the batch."""

    ids: np.ndarray
    prompt_length: int
    episode: int
    call: int
    flat_start: int

    @property
    def action_length(self) -> int:
        return len(self.ids) - self.prompt_length


def pack(episodes: Sequence[Episode], *, max_tokens: int | None = None, share_prefix: bool = True) -> list[Pack]:
    """Lay the calls of ``episodes`` out in as few rows as fit.

    Calls without sampled tokens take no part in any loss and are left out, so an empty batch gives no pack. Permuting
    the episodes changes only the order of the A axis: the rows come out the same.

    Args:
        episodes: Played episodes; only ``prompt_ids`` and ``action_ids`` of their calls are read.
        max_tokens: Most tokens in one row, counted after sharing. The calls of one episode may then lie in several
            packs. None puts everything in one row.
        share_prefix: Compute a common prefix once. False lays the calls side by side, in order, as causal sequences.

    Returns:
        Packs that together hold every sampled token exactly once.

    Raises:
        PackError: If a call is longer than ``max_tokens``, has sampled tokens but an empty prompt, or holds
            something that is no token id. Nothing is truncated.
    """
    paths = _paths(episodes, max_tokens)
    if share_prefix:
        # Big-endian bytes compare like lists of ids, at the speed of memcmp; a prefix sorts before what extends it.
        paths.sort(key=lambda path: path.ids.astype(">u4").tobytes())
    rows: list[list[tuple[_Path, int]]] = []
    used = 0
    for before, path in zip([None, *paths], paths, strict=False):
        shared = _common_prefix(before.ids, path.ids) if share_prefix and before is not None else 0
        used += len(path.ids) - shared
        if before is None or (max_tokens is not None and used > max_tokens):
            rows.append([])
            used, shared = len(path.ids), 0
        rows[-1].append((path, shared))
    return [_lay_out(row) for row in rows]


def sampled_tokens(episodes: Sequence[Episode]) -> SampledTokens:
    """Return the sampled tokens of ``episodes`` in the global order that ``Pack.flat_index`` points into.

    Raises:
        PackError: If a call records another number of log-probabilities than it has sampled tokens.
    """
    calls = [(e, c, call) for e, episode in enumerate(episodes) for c, call in enumerate(episode.calls)]
    for e, c, call in calls:
        if call.logprobs is not None and len(call.logprobs) != len(call.action_ids):
            raise PackError(
                f"episode {e}, call {c}: {len(call.logprobs)} log-probabilities for {len(call.action_ids)} sampled "
                "tokens; record one for each, or None"
            )
    lengths = torch.tensor([len(call.action_ids) for _, _, call in calls], dtype=torch.int64)
    known = all(call.logprobs is not None for _, _, call in calls)
    return SampledTokens(
        action_ids=torch.tensor([i for _, _, call in calls for i in call.action_ids], dtype=torch.int64),
        call_index=torch.tensor([c for _, c, _ in calls], dtype=torch.int64).repeat_interleave(lengths),
        episode_index=torch.tensor([e for e, _, _ in calls], dtype=torch.int64).repeat_interleave(lengths),
        logprobs=torch.tensor([p for _, _, call in calls for p in call.logprobs or ()]) if known else None,
    )


def unpack(packs: Sequence[Pack], per_pack: Sequence[Tensor]) -> Tensor:
    """Put values computed pack by pack, (A_p, ...) each, back into the global (A, ...) order.

    Raises:
        PackError: If the packs are not all the packs of one batch.
    """
    index = torch.cat([p.flat_index for p in packs])
    values = torch.cat(list(per_pack))
    if not torch.equal(index.sort().values, torch.arange(len(values), device=index.device)):
        raise PackError("these packs do not cover one batch exactly: give all packs of one call of pack()")
    return torch.empty_like(values).index_copy(0, index.to(values.device), values)


def _paths(episodes: Sequence[Episode], max_tokens: int | None) -> list[_Path]:
    paths, flat_start = [], 0
    for e, episode in enumerate(episodes):
        for c, call in enumerate(episode.calls):
            if not call.action_ids:
                continue
            if not call.prompt_ids:
                raise PackError(
                    f"episode {e}, call {c}: empty prompt, so nothing predicts its first token; give it a BOS"
                )
            length = len(call.prompt_ids) + len(call.action_ids)
            if max_tokens is not None and length > max_tokens:
                raise PackError(
                    f"episode {e} (task {episodes[e].task_id!r}), call {c}: {length} tokens, over "
                    f"max_tokens={max_tokens}: raise it, or shorten what the memory policy lets grow"
                )
            ids = np.asarray([*call.prompt_ids, *call.action_ids])
            if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 2**32:
                raise PackError(
                    f"episode {e}, call {c}: token ids are whole numbers from 0, but the call holds "
                    f"{reprlib.repr([i for i in ids.tolist() if not (isinstance(i, int) and 0 <= i < 2**32)])}"
                )
            ids = ids.astype(np.int64)
            paths.append(_Path(ids, len(call.prompt_ids), e, c, flat_start))
            flat_start += len(call.action_ids)
    return paths


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _lay_out(row: list[tuple[_Path, int]]) -> Pack:
    total = sum(len(path.ids) - shared for path, shared in row)
    input_ids, position_ids, subtree_end = (np.empty(total, dtype=np.int64) for _ in range(3))
    # Row position of each depth on the path just walked: the stack of the depth-first walk.
    stack = np.empty(max(len(path.ids) for path, _ in row), dtype=np.int64)
    action_index: dict[int, np.ndarray] = {}
    start = depth = 0
    for path, shared in row:
        subtree_end[stack[shared:depth]] = start  # leaving these nodes for good
        depth, end = len(path.ids), start + len(path.ids) - shared
        stack[shared:depth] = np.arange(start, end)
        input_ids[start:end] = path.ids[shared:]
        position_ids[start:end] = np.arange(shared, depth)
        # The last prompt token predicts the first sampled one, so every index is one to the left of its token.
        action_index[path.flat_start] = stack[path.prompt_length - 1 : depth - 1].copy()
        start = end
    subtree_end[stack[:depth]] = total

    paths = sorted((path for path, _ in row), key=lambda path: path.flat_start)
    lengths = [path.action_length for path in paths]
    return Pack(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        subtree_end=torch.from_numpy(subtree_end),
        action_index=torch.from_numpy(np.concatenate([action_index[path.flat_start] for path in paths])),
        action_ids=torch.from_numpy(np.concatenate([path.ids[path.prompt_length :] for path in paths])),
        call_index=torch.from_numpy(np.repeat([path.call for path in paths], lengths)),
        episode_index=torch.from_numpy(np.repeat([path.episode for path in paths], lengths)),
        flat_index=torch.from_numpy(
            np.concatenate([np.arange(p.flat_start, p.flat_start + p.action_length) for p in paths])
        ),
    )


def _ragged(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Turn a boolean (query tile, key tile) matrix into FlexAttention's (1, 1, ...) counts and left-packed indices."""
    count = tiles.sum(1, dtype=torch.int32)
    index = torch.argsort(tiles.to(torch.int8), dim=1, descending=True, stable=True).to(torch.int32)
    return count[None, None], index[None, None]
