"""A key-value cache in which a row is a request and an index is a position.

Rows hold sequences of different lengths side by side: row ``r`` keeps the key of its position ``p`` at index ``p``,
so no padding is ever stored, a new request goes into the next free row, and a finished one is overwritten by the last
row. The model sees the rows and positions that the engine selected for this forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig
from transformers.cache_utils import Cache

ROW_ATTENTION = "memopd_rows"
_GROWTH = 128


class RowCache(Cache):
    """Keys and values of up to ``max_rows`` requests; grows along rows and positions as needed.

    Args:
        config: The model's text configuration; every layer must have full attention.
        max_rows: Most requests at a time.
        dtype: Of keys and values.
        device: Where they live.
    """

    def __init__(self, config: PretrainedConfig, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layers=[])
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.dtype = dtype
        self._max_rows = max_rows
        # layers, (key, value), rows, heads, positions, head width
        self._store = torch.empty((config.num_hidden_layers, 2, 0, heads, 0, head_dim), dtype=dtype, device=device)

    def reserve(self, rows: int, positions: int) -> None:
        """Make room for ``rows`` requests of ``positions`` tokens; what is stored stays."""
        old = self._store
        if rows <= old.shape[2] and positions <= old.shape[4]:
            return
        rows = max(old.shape[2], min(self._max_rows, max(rows, 2 * old.shape[2])))
        positions = max(old.shape[4], -(-positions // _GROWTH) * _GROWTH)
        # Zeros, not garbage: a masked key may hold anything finite, but NaN times a zero weight is NaN.
        self._store = old.new_zeros((*old.shape[:2], rows, old.shape[3], positions, old.shape[5]))
        self._store[:, :, : old.shape[2], :, : old.shape[4]] = old

    def select(self, first: int, last: int, length: int, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Choose what the next forward pass reads and writes.

        Args:
            first: First row it reads.
            last: One past the last row.
            length: Number of positions it reads.
            rows: Where the key of each input token is stored, tokens in the order of the flattened (row, query) input.
            positions: The same for positions.
        """
        self._window = (slice(first, last), slice(None), slice(None, length))
        self._length, self._write_rows, self._write_positions = length, rows, positions

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store this layer's new keys and values and return those that the selected rows may attend to."""
        keys, values = self._store[layer_idx]
        for stored, new in ((keys, key_states), (values, value_states)):
            stored[self._write_rows, :, self._write_positions] = new.transpose(1, 2).flatten(0, 1)
        return keys[self._window], values[self._window]

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Overwrite the target rows with the source rows."""
        self._store[:, :, targets] = self._store[:, :, sources]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of positions that the current forward pass reads."""
        return self._length


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with grouped heads but without copying the cache once per group.

    With one query per row, the heads of a group share keys and are folded into the query axis, under an additive mask
    of shape (rows, 1, 1, keys). Without a mask it is causal attention over as many keys as queries. The signature is
    that of transformers' attention functions.
    """
    rows, heads, queries, width = query.shape
    groups = heads // key.shape[1]
    if attention_mask is None:
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
    else:
        folded = query.reshape(rows, key.shape[1], groups, width)
        output = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, heads, queries, value.shape[3]).transpose(1, 2), None


AttentionInterface.register(ROW_ATTENTION, row_attention)
