import json

import numpy as np
import pytest

from memopd_env.retrieval.encoders import load_encoder
from memopd_env.retrieval.errors import EncoderError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "query", "passage", ":", "river", "bridge", "castle", "the"]
TEXTS = ["the river", "the castle bridge river the the", "bridge"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(vocab_file=str(folder / "vocab.txt"), model_max_length=64).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=300,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def by_hand(folder, text, pooling):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        hidden = network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    vector = (hidden.mean(0) if pooling == "mean" else hidden[0]).numpy()
    return vector / np.linalg.norm(vector)


def sentence_folder(model, tmp_path, pooling, **files):
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == pooling for name in ("mean_tokens", "cls_token", "max_tokens")}
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return tmp_path


def test_e5_prefixes_and_averages_over_real_tokens_only(model):
    encoder = load_encoder(f"e5:{model}", device="cpu", batch_size=2)
    assert encoder.dim == 32
    for encode, prefix in ((encoder.encode_queries, "query: "), (encoder.encode_passages, "passage: ")):
        expected = np.stack([by_hand(model, prefix + text, "mean") for text in TEXTS])
        assert np.allclose(encode(TEXTS), expected, atol=1e-5)


def test_e5_reads_256_tokens(model):
    encoder = load_encoder(f"e5:{model}", device="cpu")
    long = "river " * 300
    assert np.allclose(encoder.encode_queries([long]), encoder.encode_queries([long + " castle"]), atol=1e-6)


def test_a_sentence_transformers_folder_says_how_it_pools_and_prompts(model, tmp_path):
    folder = sentence_folder(
        model,
        tmp_path,
        "cls_token",
        config_sentence_transformers={"prompts": {"query": "query: ", "document": ""}},
        sentence_bert_config={"max_seq_length": 16},
    )
    encoder = load_encoder(f"st:{folder}", device="cpu")
    assert np.allclose(encoder.encode_queries(["river"])[0], by_hand(folder, "query: river", "cls"), atol=1e-5)
    assert np.allclose(encoder.encode_passages(["river"])[0], by_hand(folder, "river", "cls"), atol=1e-5)
    long = "river " * 20
    assert np.allclose(encoder.encode_passages([long]), encoder.encode_passages([long + "castle"]), atol=1e-6)


def test_what_a_folder_asks_for_and_is_not_supported_is_refused(model, tmp_path):
    folder = sentence_folder(model, tmp_path, "max_tokens")
    with pytest.raises(EncoderError, match="only mean and cls are supported"):
        load_encoder(f"st:{folder}", device="cpu")
    (folder / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(EncoderError, match=r"not supported here \(sentence_transformers.models.Dense\)"):
        load_encoder(f"st:{folder}", device="cpu")


def test_a_model_that_is_not_there_is_refused_with_the_cure(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EncoderError, match="give a folder with a safetensors model"):
        load_encoder(f"e5:{tmp_path}", device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused(model):
    with pytest.raises(EncoderError, match="no usable GPU"):
        load_encoder(f"e5:{model}", device="cuda")
