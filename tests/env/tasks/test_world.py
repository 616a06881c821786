import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_env.errors import ConfigError
from memopd_env.retrieval import SparseRetriever
from memopd_env.tasks.world import SPLITS, World, WorldConfig, majority_baseline, permute

GOLDEN = {
    "default": "83137c0fe0124816301b3ef8cfff8a94e75448e1b02e287105ee5fc6fc8c0179",
    "tiny": "04f18fcbd6d90564f4cda3346553e5d781d8df555390ecd468cca14770e90379",
}


@pytest.fixture(scope="module", params=["default", "tiny"])
def world(request) -> World:
    return World(request.param)


@given(size=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=30, deadline=None)
def test_permute_is_a_bijection(size, key):
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


@pytest.mark.parametrize("preset", GOLDEN)
def test_corpus_is_the_same_on_every_platform(preset):
    assert World(preset).corpus_hash == GOLDEN[preset]


def test_corpus_is_the_same_in_a_new_process():
    code = "from memopd_env.tasks.world import World; print(World('tiny').corpus_hash)"
    environment = {"PYTHONHASHSEED": "77"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == GOLDEN["tiny"]


def test_another_seed_is_another_world():
    assert World(WorldConfig(passages=200, seed=1)).corpus_hash != World(WorldConfig(passages=200, seed=2)).corpus_hash


def test_a_passage_can_be_made_alone(world):
    assert [world.passage(i) for i in (0, 17, 3999)] == [
        p for i, p in enumerate(world.passages()) if i in (0, 17, 3999)
    ]


def test_titles_are_unique(world):
    titles = [passage.title for passage in world.passages()]
    assert len(set(titles)) == len(titles) == len(world)


def test_names_are_unique_across_generations_of_a_large_world():
    world = World(WorldConfig(passages=1_000_000))
    numbers = [*range(0, 30_000), *range(480_000, 510_000), *range(970_000, 1_000_000)]
    assert len({world.name(i) for i in numbers}) == 90_000


def test_writing_a_corpus_streams_what_passages_gives(tmp_path):
    world = World(WorldConfig(passages=150))
    assert world.write_corpus(tmp_path / "corpus.jsonl") == 150
    rows = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert rows == [{"id": p.id, "contents": p.contents} for p in world.passages()]
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_writing_a_larger_world_takes_no_more_memory(tmp_path):
    code = (
        "import resource, sys, pathlib; from memopd_env.tasks.world import World, WorldConfig\n"
        "World(WorldConfig(passages=int(sys.argv[1]))).write_corpus(pathlib.Path(sys.argv[2]))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peak = {}
    for passages in (5_000, 25_000):
        command = [sys.executable, "-c", code, str(passages), str(tmp_path / "corpus.jsonl")]
        peak[passages] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert peak[25_000] < peak[5_000] + 20_000  # KiB


# Splits


def test_splits_partition_the_entities(world):
    seen = [index for split in SPLITS for index in world.indices(split)]
    assert sorted(seen) == list(range(len(world)))
    assert all(world.split_of(index) == split for split in SPLITS for index in world.indices(split))


def test_no_entity_of_a_test_question_occurs_in_a_training_question_or_answer(world):
    def texts(split):
        tasks = world.tasks(2, split, 400)
        return {t for task in tasks for titles in task.entities for t in titles}, {
            a for task in tasks for answers in task.answers for a in answers
        }

    test_entities, _ = texts("test")
    train_entities, train_answers = texts("train")
    assert test_entities
    assert not test_entities & train_entities
    assert not test_entities & train_answers


# Questions


@pytest.mark.parametrize("number", [1, 2, 8, 16])
def test_a_task_asks_different_questions_about_different_subjects(world, number):
    for task in world.tasks(number, "test", 20, seed=3):
        assert len(task.questions) == len(set(task.questions)) == number
        assert len({titles[0] for titles in task.entities}) == number


def test_questions_repeat_only_once_all_have_been_asked():
    world = World("tiny")
    tasks = world.tasks(2, "test", 500)
    questions = [question for task in tasks for question in task.questions]
    assert len(questions) == 1000 == len(set(questions))


def test_the_answer_stands_in_the_passage_of_the_last_entity(world):
    by_title = {passage.title: passage for passage in world.passages()}
    for task in world.tasks(4, "validation", 50, seed=1):
        for answers, titles in zip(task.answers, task.entities, strict=True):
            assert answers[0] in by_title[titles[-1]].text


def test_two_hop_questions_name_the_first_entity_only():
    world = World("default")
    tasks = world.tasks(2, "test", 200, two_hop=1.0)
    asked = [pair for task in tasks for pair in zip(task.questions, task.entities, strict=True)]
    pairs = [(question, titles) for question, titles in asked if len(titles) == 2]
    assert len(pairs) > 100
    for question, (first, bridge) in pairs:
        assert first in question
        assert bridge not in question


def test_similar_names_are_everywhere():
    world = World("default")
    families = [world.name(i).split()[-1] for i in range(0, 400, 4)]
    assert len(set(families)) < len(families) / 2


def test_aliases_are_accepted_and_written_in_the_passage():
    world = World("default")
    named = [i for i in range(400) if world.aliases(i)]
    assert named
    assert all(world.aliases(i)[0] in world.passage(i).text for i in named)


def test_the_right_passage_is_found_by_name(world):
    passages = list(world.passages())
    retriever = SparseRetriever.from_passages(passages)
    chosen = passages[:: len(passages) // 100]
    found = retriever.search([passage.title for passage in chosen], 3)
    hits = sum(passage.id in {p.id for p in top} for passage, top in zip(chosen, found, strict=True))
    assert hits >= 0.95 * len(chosen)


def test_answers_cannot_be_guessed_from_the_question(world):
    assert majority_baseline(world.tasks(2, "test", 500)) < 0.12


# Bad input


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"passages": 99}, "99"),
        ({"passages": 1_000_001}, "1,000,001"),
        ({"style": "verse"}, "verse"),
        ({"style": "terse", "passages": 5000}, "4,096"),
        ({"style": "terse", "facts": 9}, "facts"),
        ({"two_hop": 1.5}, "two_hop"),
        ({"test_share": 0.0}, "test_share"),
    ],
)
def test_a_world_that_cannot_be_is_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        WorldConfig(**options)


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(ConfigError, match="default, tiny"):
        World("huge")


def test_an_unknown_split_names_the_known_ones(world):
    with pytest.raises(ConfigError, match="train, validation, test"):
        world.tasks(2, "dev", 1)


def test_a_terse_world_has_no_second_hop():
    with pytest.raises(ConfigError, match="two-hop"):
        World("tiny").tasks(2, "train", 1, two_hop=0.5)
