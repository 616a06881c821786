from __future__ import annotations

import json
import shutil

import pytest

from memopd_agents.pretrained import load_causal_lm, load_tokenizer
from memopd_env.errors import ConfigError

from .conftest import make_model, make_tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "whole"
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_model(tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def test_whole_folder_is_loaded(folder):
    assert load_tokenizer(str(folder)).encode("some text")
    assert load_causal_lm(str(folder)).config.vocab_size > 0


@pytest.mark.parametrize("damage", ["empty", "cut", "junk", "gone", "narrower", "no config"])
def test_damaged_model_is_one_error_that_names_the_folder(folder, damage):
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "gone":
        weights.unlink()
    elif damage == "narrower":
        record = json.loads(config.read_text())
        config.write_text(json.dumps({**record, "intermediate_size": record["intermediate_size"] + 8}))
    elif damage == "no config":
        config.write_text("{")
    else:
        data = weights.read_bytes()
        weights.write_bytes({"empty": b"", "cut": data[: len(data) // 2], "junk": b"\xff" * len(data)}[damage])
    with pytest.raises(ConfigError, match=r"cannot load model '.*model': \S"):
        load_causal_lm(str(folder))


@pytest.mark.parametrize("content", [None, "", "{", '{"a": 1}'])
def test_damaged_tokenizer_is_one_error_that_names_the_folder(folder, content):
    if content is None:
        (folder / "tokenizer.json").unlink()
    else:
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(str(folder))
