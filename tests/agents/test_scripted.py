import pytest

from memopd_agents.scripted import OracleAgent, RandomAgent
from memopd_env import MemOPDEnv, Task
from memopd_env.errors import ConfigError
from memopd_env.protocol import ActionKind, Tags, parse_action
from memopd_env.retrieval import Passage, SparseRetriever
from memopd_env.tasks.world import World


def play(agent, env, index=0, seed=0):
    agent.reset(seed)
    observation, info = env.reset(seed=seed, options={"task_index": index})
    actions, done, reward = [], False, 0.0
    while not done:
        actions.append(agent.act(observation, info))
        observation, reward, terminated, truncated, info = env.step(actions[-1])
        done = terminated or truncated
    return actions, reward, info["episode"]


@pytest.fixture(scope="module")
def world():
    return World("default")


@pytest.fixture(scope="module")
def retriever(world):
    return SparseRetriever.from_passages(list(world.passages()))


@pytest.mark.parametrize(("number", "two_hop"), [(2, 0.0), (2, 1.0), (8, 0.2)])
def test_the_oracle_answers_nearly_everything(world, retriever, number, two_hop):
    tasks = world.tasks(number, "test", 20, two_hop=two_hop)
    env = MemOPDEnv(number, tasks=tasks, retriever=retriever, max_turns=2 * number + 1)
    rewards = [play(OracleAgent(tasks), env, index)[1] for index in range(20)]
    assert sum(rewards) >= 0.95 * 20 * number


def test_the_oracle_cannot_answer_what_the_retriever_does_not_show(world):
    tasks = world.tasks(2, "test", 5)
    empty = SparseRetriever.from_passages([Passage("0", "Nothing", "There is nothing here.")])
    env = MemOPDEnv(2, tasks=tasks, retriever=empty)
    for index in range(5):
        _, reward, summary = play(OracleAgent(tasks), env, index)
        assert reward == 0
        assert summary["answers"] == ["unknown", "unknown"]


def test_the_oracle_writes_an_answer_only_after_it_was_shown(world, retriever):
    tasks = world.tasks(2, "test", 10)
    env = MemOPDEnv(2, tasks=tasks, retriever=retriever)
    for index, task in enumerate(tasks):
        agent = OracleAgent(tasks)
        observation, info = env.reset(options={"task_index": index})
        shown, done = observation["task"], False
        while not done:
            shown += observation["information"]
            action = agent.act(observation, info)
            for answer in (accepted[0] for accepted in task.answers):
                assert answer not in action or answer in shown
            observation, _, terminated, truncated, info = env.step(action)
            done = terminated or truncated


def test_the_oracle_carries_what_it_found_in_its_memory():
    task = Task("t", ["Who is A?", "Who is B?"], [["Ann"], ["Bob"]], entities=[["A"], ["B"]])
    retriever = SparseRetriever.from_passages([Passage("0", "A", "A is Ann."), Passage("1", "B", "B is Bob.")])
    actions, reward, _ = play(OracleAgent([task]), MemOPDEnv(2, tasks=[task], retriever=retriever, top_k=1))
    assert actions == [
        "<think> Who is A ?; Who is B ?</think><search> A</search>",
        "<think> Who is A Ann; Who is B ?</think><search> B</search>",
        "<think> Who is A Ann; Who is B Bob</think><answer> Ann; Bob</answer>",
    ]
    assert reward == 2


def test_the_oracle_answers_when_its_turns_are_used_up(world, retriever):
    tasks = world.tasks(2, "test", 1)
    _, _, summary = play(OracleAgent(tasks), MemOPDEnv(2, tasks=tasks, retriever=retriever, max_turns=2))
    assert summary["stop_reason"] == "answered"
    assert "unknown" in summary["answers"]


def test_the_oracle_searches_for_the_question_where_entities_are_not_known():
    task = Task("t", ["Who is A?"], [["Ann"]])
    retriever = SparseRetriever.from_passages([Passage("0", "A", "A is Ann.")])
    actions, reward, _ = play(OracleAgent([task]), MemOPDEnv(1, tasks=[task], retriever=retriever))
    assert parse_action(actions[0]).content == "Who is A?"
    assert reward == 1


def test_the_oracle_never_searches_for_a_name_that_it_was_not_shown():
    task = Task(
        "t",
        ["Who led the guild of Ulm?", "What is the highest point of Poland?", "When did the maker of the Ark die?"],
        [["Ann Lee"], ["Rysy"], ["1745"]],
        entities=[["Ann Lee"], ["Geography of Poland"], ["Ark (boat)", "Bo Dan"]],
    )
    passages = [
        Passage("0", "Ann Lee", "Ann Lee led the guild of Ulm."),
        Passage("1", "Geography of Poland", "Its summit is Rysy."),
        Passage("2", "Ark (boat)", "The Ark was made by Bo Dan."),
        Passage("3", "Bo Dan", "Bo Dan died in 1745."),
    ]
    env = MemOPDEnv(3, tasks=[task], retriever=SparseRetriever.from_passages(passages), top_k=1)
    actions, reward, _ = play(OracleAgent([task]), env)
    queries = [parse_action(action).content for action in actions]
    assert queries[0] == task.questions[0]  # its title is the answer
    assert queries[1:4] == ["Geography of Poland", "Ark (boat)", "Bo Dan"]  # named by question, question, passage
    assert reward == 3


def test_the_oracle_gives_up_rather_than_repeat_a_search_or_guess():
    task = Task("t", ["When did the maker of the Ark die?"], [["1745"]], entities=[["Ark", "Bo Dan"]])
    passages = [Passage("0", "Ark", "The Ark was made by B. D."), Passage("1", "Bo Dan", "Bo Dan died in 1745.")]
    env = MemOPDEnv(1, tasks=[task], retriever=SparseRetriever.from_passages(passages), top_k=1)
    actions, _, _ = play(OracleAgent([task]), env)
    queries = [parse_action(action).content for action in actions]
    assert queries == ["Ark", task.questions[0], "unknown"]


def test_the_oracle_names_a_task_it_was_not_given(world, retriever):
    tasks = world.tasks(2, "test", 2)
    with pytest.raises(ConfigError, match=tasks[1].id):
        play(OracleAgent(tasks[:1]), MemOPDEnv(2, tasks=tasks, retriever=retriever), index=1)


def test_scripted_agents_speak_other_tags(world, retriever):
    tags = Tags(think="thought", search="query", answer="final")
    tasks = world.tasks(2, "test", 1)
    env = MemOPDEnv(2, tasks=tasks, retriever=retriever, tags=tags)
    for agent in (OracleAgent(tasks, tags), RandomAgent(tags=tags)):
        assert play(agent, env)[2]["invalid_actions"] == 0


def test_the_random_agent_always_acts_validly_and_repeatably(world, retriever):
    tasks = world.tasks(2, "test", 10)
    env = MemOPDEnv(2, tasks=tasks, retriever=retriever)
    for index in range(10):
        first = play(RandomAgent(), env, index, seed=index)[0]
        assert play(RandomAgent(), env, index, seed=index)[0] == first
        assert all(parse_action(action).kind is not ActionKind.INVALID for action in first)
