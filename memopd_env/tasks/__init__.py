"""What is asked: tasks, their files, how they are composed, and the built-in world they can come from."""

from memopd_env.tasks.io import read_tasks, write_tasks
from memopd_env.tasks.task import Task

__all__ = ["Task", "read_tasks", "write_tasks"]
