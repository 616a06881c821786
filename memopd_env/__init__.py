"""The gym for search agents that must forget.

Importing it registers the environments:

======================  =========================================
``MemOPD-WikiRAG``      one question
``MemOPD-Q2``           two questions in one episode
``MemOPD-Q8``           eight
``MemOPD-Q16``          sixteen
======================  =========================================

``gymnasium.make("memopd_env:MemOPD-Q16")`` imports this package by itself.
"""

from __future__ import annotations

import gymnasium as gym

from memopd_env.env import MemOPDEnv, StopReason
from memopd_env.tasks.task import Task
from memopd_env.vector import MemOPDVectorEnv

__all__ = ["MemOPDEnv", "MemOPDVectorEnv", "StopReason", "Task"]

ENVIRONMENTS = {"MemOPD-WikiRAG": 1, "MemOPD-Q2": 2, "MemOPD-Q8": 8, "MemOPD-Q16": 16}

for _id, _questions in ENVIRONMENTS.items():
    gym.register(
        id=_id,
        entry_point="memopd_env.env:MemOPDEnv",
        vector_entry_point="memopd_env.vector:MemOPDVectorEnv",
        kwargs={"num_questions": _questions},
    )
