"""The task value."""

import pytest

from memopd_env import Task
from memopd_env.errors import TaskError


def test_lists_become_tuples_so_that_a_task_is_a_value():
    task = Task("t", ["q?"], [["a", "b"]], entities=[["E"]])
    assert task == Task("t", ("q?",), (("a", "b"),), entities=(("E",),))
    assert hash(task) == hash(Task("t", ("q?",), (("a", "b"),), entities=(("E",),)))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (([], []), "no questions"),
        ((["q?"], []), "1 questions but 0"),
        ((["q?", " "], [["a"], ["b"]]), "question 2 is blank"),
        ((["q?"], [["a", " "]]), "accepts a blank answer"),
        ((["q?"], [[]]), "no accepted answer"),
        (("q?", [["a"]]), "list of strings"),
        ((["q?"], ["a"]), "list of lists"),
        ((["q?"], [["a"]], "", "", [["E"], ["F"]]), "2 lists of entities"),
    ],
)
def test_malformed_tasks_are_refused(arguments, complaint):
    with pytest.raises(TaskError, match=complaint):
        Task("t", *arguments)
