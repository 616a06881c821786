"""Models from one word."""

import pytest
import torch

from memopd_env.errors import ConfigError
from memopd_train.loading import load_model, open_model


def test_a_new_model_speaks_the_terse_world_or_what_it_was_shown():
    terse, tokenizer = open_model("new:tiny")
    assert len(tokenizer) == terse.config.vocab_size
    learned, other = open_model("new:tiny", texts=["The coat of Arno is red."] * 3)
    assert other.decode(other.encode("The coat ✓")) == "The coat ✓"
    assert len(other) == learned.config.vocab_size


def test_the_seed_makes_the_weights():
    one, two, three = (open_model("new:tiny", seed=seed)[0].lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, three)


def test_a_saved_model_comes_back_in_full_precision(colours, tmp_path):
    colours.stranger().to(torch.bfloat16).save_pretrained(tmp_path)
    colours.tokenizer.save_pretrained(tmp_path)
    model, tokenizer = open_model(str(tmp_path))
    assert model.dtype == torch.float32
    assert len(tokenizer) == len(colours.tokenizer)


def test_a_run_folder_is_not_a_model(tmp_path):
    with pytest.raises(ConfigError, match="folder model/"):
        load_model(str(tmp_path))
