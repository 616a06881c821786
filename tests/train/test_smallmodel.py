import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from memopd_env.errors import ConfigError
from memopd_env.protocol import Tags
from memopd_env.tasks import world
from memopd_train.smallmodel import ModelShape, learned_tokenizer, new_model, pieces_tokenizer, terse_world_tokenizer

TERSE = terse_world_tokenizer()
LEARNED = learned_tokenizer(["The quick brown fox was born in 1898.", "Which year was the fox born in?"], 300)


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("tokenizer", [TERSE, LEARNED], ids=["terse", "learned"])
@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_text_survives_encoding_up_to_unicode_normalisation(tokenizer, text):
    import unicodedata

    assert tokenizer.decode(ids(tokenizer, text)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("tokenizer", [TERSE, LEARNED], ids=["terse", "learned"])
def test_a_protocol_tag_is_one_token_and_no_special_one(tokenizer):
    for name in Tags().names:
        for mark in (f"<{name}>", f"</{name}>"):
            (token,) = ids(tokenizer, mark)
            assert tokenizer.decode([token], skip_special_tokens=True) == mark


def test_names_and_values_of_the_terse_world_are_two_tokens_each():
    tiny = world.World("tiny")
    for index in range(0, 4000, 37):
        assert len(ids(TERSE, f" {tiny.name(index)}")) == 2
        for fact in tiny.facts(index):
            assert len(ids(TERSE, f" {fact.value}")) <= 2
    assert len(ids(TERSE, " river")) == 1


def test_earlier_pieces_win():
    tokenizer = pieces_tokenizer([" ab", "cd", "bcd"])
    assert tokenizer.convert_ids_to_tokens(ids(tokenizer, " abcd")) == ["Ġab", "cd"]


def test_digits_stay_single():
    assert len(ids(LEARNED, "1898")) == 4


def test_a_saved_model_brings_its_tokenizer_back(tmp_path):
    new_model(TERSE).save_pretrained(tmp_path)
    TERSE.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "<think> Pele song ?; Mima river relor</think><search> Pele</search> ☃"
    assert ids(loaded, text) == ids(TERSE, text)
    assert loaded.decode(ids(TERSE, text)) == text
    assert loaded.chat_template == TERSE.chat_template
    assert loaded.eos_token == TERSE.eos_token
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == len(loaded)


def test_weights_depend_on_the_seed_alone_and_leave_the_global_stream_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = (new_model(TERSE, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_half_the_heads_of_the_first_layer_begin_by_looking_one_token_back():
    model = new_model(TERSE, ModelShape(layers=2, width=128, heads=4))
    model.set_attn_implementation("eager")
    tokens = torch.randint(0, len(TERSE), (1, 80))
    attention = model(tokens, output_attentions=True).attentions[0][0]
    back = attention.diagonal(-1, 1, 2)[:, 4:].mean(-1)
    assert (back[:2] > 0.8).all()
    assert (back[2:] < 0.2).all()


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(ConfigError, match="100"):
        new_model(TERSE, ModelShape(width=100, heads=3))


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(ConfigError, match="256"):
        learned_tokenizer(["a"], 100)
