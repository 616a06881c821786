"""Who plays: agents, the engines that sample their tokens, rollouts that record them, evaluations that measure them.

Importing it needs no torch: an engine is imported when it is asked for.
"""

from __future__ import annotations

from memopd_agents.agent import Agent, FunctionAgent
from memopd_agents.chat import ChatAgent
from memopd_agents.episode import Call, Episode, SegmentSpan, read_episodes, write_episodes
from memopd_agents.evaluation import evaluate, format_table
from memopd_agents.play import play_episode, play_episodes
from memopd_agents.policy import PolicyAgent
from memopd_agents.rollout import rollout
from memopd_agents.scripted import OracleAgent, RandomAgent

__all__ = [
    "Agent",
    "Call",
    "ChatAgent",
    "Episode",
    "FunctionAgent",
    "OracleAgent",
    "PolicyAgent",
    "RandomAgent",
    "SegmentSpan",
    "evaluate",
    "format_table",
    "play_episode",
    "play_episodes",
    "read_episodes",
    "rollout",
    "write_episodes",
]
