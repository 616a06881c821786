from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopd_agents.episode import (
    Call,
    Episode,
    EpisodeFileError,
    EpisodeLog,
    SegmentSpan,
    read_episodes,
    write_episodes,
)

IDS = st.lists(st.integers(0, 200_000), max_size=5)
TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
CALLS = st.builds(
    Call,
    IDS,
    IDS,
    st.none() | st.lists(st.floats(-50, 0), max_size=5),
    st.lists(st.builds(SegmentSpan, st.sampled_from(["task", "action"]), st.integers(-1, 9), st.just(0), st.just(3))),
    text=TEXT,
    context=st.lists(st.tuples(st.just("task"), st.integers(-1, 9), TEXT), max_size=2),
)
EPISODES = st.builds(
    Episode,
    st.lists(CALLS, max_size=3),
    st.floats(0, 16),
    task_id=TEXT,
    info=st.dictionaries(TEXT, st.integers() | TEXT | st.lists(st.floats(0, 1)), max_size=3),
    seed=st.none() | st.integers(0, 2**63),
)


def episode(number: int) -> Episode:
    return Episode([Call([1, 2], [3])], 1.0, f"t{number}", number=number)


@given(EPISODES)
def test_episode_survives_json(written):
    line = written.to_json()
    assert "\n" not in line
    assert Episode.from_json(line) == written


def test_two_lists_of_ids_are_enough():
    assert Episode.from_json('{"calls": [{"prompt_ids": [1], "action_ids": [2]}], "reward": 1}') == Episode(
        [Call([1], [2])], 1
    )


def test_unknown_fields_of_a_later_version_are_ignored():
    record = json.loads(episode(0).to_json())
    record["later"] = record["calls"][0]["later"] = 1
    assert Episode.from_json(json.dumps(record)) == episode(0)


def test_appended_episodes_are_read_back_in_order(tmp_path):
    path = tmp_path / "new" / "episodes.jsonl"
    with EpisodeLog(path) as log:
        log.append(episode(0))
        log.append(episode(1), episode(2))
    with EpisodeLog(path) as log:
        assert [known.number for known in log.episodes] == [0, 1, 2]
        log.append(episode(3))
    assert list(read_episodes(path)) == [episode(number) for number in range(4)]


@pytest.mark.parametrize("cut", [1, 10, 10_000])
def test_line_cut_short_by_a_crash_is_dropped(tmp_path, cut):
    path = tmp_path / "episodes.jsonl"
    write_episodes(path, [episode(0), episode(1)])
    whole = path.read_bytes()
    torn = (episode(2).to_json() * 400).encode()[:cut]
    path.write_bytes(whole + torn)
    assert len(list(read_episodes(path))) == 2
    with EpisodeLog(path) as log:
        assert path.read_bytes() == whole
        log.append(episode(2))
    assert [known.number for known in read_episodes(path)] == [0, 1, 2]


def test_file_of_nothing_but_a_torn_line_becomes_empty(tmp_path):
    path = tmp_path / "episodes.jsonl"
    path.write_text('{"calls": [')
    with EpisodeLog(path) as log:
        assert log.episodes == []
    assert path.read_bytes() == b""


@pytest.mark.parametrize("line", ["{", "[]", "null", '{"reward": 1}', '{"calls": [1], "reward": 1}', "\xff"])
def test_malformed_line_is_named(tmp_path, line):
    path = tmp_path / "episodes.jsonl"
    path.write_bytes(episode(0).to_json().encode() + b"\n" + line.encode("latin-1") + b"\n")
    with pytest.raises(EpisodeFileError, match=r"episodes\.jsonl, line 2: not an episode"):
        list(read_episodes(path))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(EpisodeFileError, match=r"gone\.jsonl: no such episode file"):
        list(read_episodes(tmp_path / "gone.jsonl"))


def test_writing_replaces_a_file_only_once_all_is_written(tmp_path):
    path = tmp_path / "episodes.jsonl"
    write_episodes(path, [episode(0)])

    def failing():
        yield episode(1)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_episodes(path, failing())
    assert list(read_episodes(path)) == [episode(0)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", "0"),
        ("number", None),
        ("number", True),
        ("reward", "1"),
        ("info", None),
        ("info", []),
        ("seed", "x"),
        ("task_id", None),
        ("seconds", "x"),
        ("prompt_ids", ["a"]),
        ("action_ids", None),
        ("action_ids", [-1]),
        ("logprobs", ["x"]),
        ("text", None),
        ("usage", []),
        ("finish_reason", 3),
        ("context", [["nonsense", 0, "text"]]),
        ("context", [["task", -1, None]]),
        ("segments", [{"kind": "task", "turn": -1, "start": 0, "end": 1, "exact": 1}]),
        ("segments", [{"kind": "nonsense", "turn": -1, "start": 0, "end": 1}]),
    ],
)
def test_field_that_holds_something_else_is_named(field, value):
    record = json.loads(episode(0).to_json())
    (record if field in record else record["calls"][0])[field] = value
    with pytest.raises(ValueError, match=f"{field}|exact|kind of a segment"):
        Episode.from_json(json.dumps(record))
