"""Who learns: token-exact packs of calls, PPO with on-policy distillation, and the cold start before it.

Public names are loaded when first used, so that looking at one room does not import torch for all of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memopd_train.config import MemOPDConfig as MemOPDConfig
    from memopd_train.config import MemOPDSFTConfig as MemOPDSFTConfig
    from memopd_train.sft import train_sft as train_sft
    from memopd_train.trainer import MemOPDTrainer as MemOPDTrainer

_HOMES = {
    "MemOPDConfig": "config",
    "MemOPDSFTConfig": "config",
    "MemOPDTrainer": "trainer",
    "train_sft": "sft",
}

__all__ = ["MemOPDConfig", "MemOPDSFTConfig", "MemOPDTrainer", "train_sft"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"memopd_train.{_HOMES[name]}"), name)
