from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from memopd_agents.engines import Completion, Engine, EngineError, HFEngine, PromptTooLongError, Request, SamplingParams
from memopd_agents.engines.hf import weights_checksum
from memopd_env.errors import ConfigError

from ..conftest import make_model, make_tokenizer

PLAIN = SamplingParams(max_tokens=24)


def requests(count: int, sampling: SamplingParams = PLAIN, seed: int = 0) -> list[Request]:
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, 256, size=random.integers(1, 60)).tolist() for _ in range(count)]
    return [Request(prompt, sampling, number, str(number)) for number, prompt in enumerate(prompts)]


def run(engine: Engine, submitted: list[Request]) -> dict[str, Completion]:
    for request in submitted:
        engine.submit(request)
    done = {}
    while finished := engine.poll():
        done.update({completion.request_id: completion for completion in finished})
    return done


def full_logprobs(model: Qwen2ForCausalLM, request: Request, completion: Completion, tokens: int) -> torch.Tensor:
    """Log-probabilities over the vocabulary at every sampled token, from one plain forward pass."""
    ids = torch.tensor([request.prompt_ids + completion.action_ids])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1, :tokens]
    return logits.log_softmax(-1)


def test_implements_the_engine_contract(model, tokenizer):
    assert isinstance(HFEngine(model, tokenizer), Engine)


def test_batch_of_many_samples_what_each_request_samples_alone(model, tokenizer):
    submitted = requests(20)
    together = run(HFEngine(model, tokenizer, max_batch=7), submitted)
    for request in submitted:
        alone = run(HFEngine(model, tokenizer, max_batch=1), [request])[request.request_id]
        assert together[request.request_id].action_ids == alone.action_ids
        np.testing.assert_allclose(together[request.request_id].logprobs, alone.logprobs, atol=1e-4)


def test_late_arrivals_change_nothing(model, tokenizer):
    submitted = requests(12)
    expected = run(HFEngine(model, tokenizer), submitted)
    engine = HFEngine(model, tokenizer, max_batch=5)
    done: dict[str, Completion] = {}
    for request in submitted:
        engine.submit(request)
        done.update({completion.request_id: completion for completion in engine.poll()})
    done.update(run(engine, []))
    assert {id: completion.action_ids for id, completion in done.items()} == {
        id: completion.action_ids for id, completion in expected.items()
    }


@pytest.mark.parametrize("prefill", [64, 8192])
def test_logprobs_equal_a_plain_forward_pass(model, tokenizer, prefill):
    submitted = requests(9)
    done = run(HFEngine(model, tokenizer, max_batch=4, max_prefill_tokens=prefill), submitted)
    for request in submitted:
        completion = done[request.request_id]
        expected = full_logprobs(model, request, completion, len(tokenizer))
        chosen = expected.gather(1, torch.tensor(completion.action_ids)[:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, chosen, atol=1e-4)


def test_logprobs_are_of_the_distribution_that_was_sampled(model, tokenizer):
    sampling = SamplingParams(max_tokens=10, temperature=0.7, top_k=5)
    submitted = requests(4, sampling)
    done = run(HFEngine(model, tokenizer), submitted)
    for request in submitted:
        completion = done[request.request_id]
        tempered = full_logprobs(model, request, completion, len(tokenizer)) / 0.7
        kept, ids = tempered.topk(5)
        for token, logprob, row, top in zip(completion.action_ids, completion.logprobs, kept, ids, strict=True):
            place = top.tolist().index(token)
            assert logprob == pytest.approx(float(row.log_softmax(-1)[place]), abs=1e-4)


def test_greedy_takes_the_most_likely_token(model, tokenizer):
    submitted = requests(5, SamplingParams(max_tokens=12, temperature=0))
    done = run(HFEngine(model, tokenizer), submitted)
    for request in submitted:
        completion = done[request.request_id]
        expected = full_logprobs(model, request, completion, len(tokenizer))
        assert completion.action_ids == expected.argmax(-1).tolist()
        np.testing.assert_allclose(completion.logprobs, expected.max(-1).values, atol=1e-4)


def test_different_sampling_side_by_side(model, tokenizer):
    base = requests(6)
    kinds = [PLAIN, SamplingParams(max_tokens=9, temperature=0), SamplingParams(max_tokens=5, top_p=0.5)]
    mixed = [dataclasses.replace(request, sampling=kinds[i % 3]) for i, request in enumerate(base)]
    together = run(HFEngine(model, tokenizer), mixed)
    for request in mixed:
        alone = run(HFEngine(model, tokenizer), [request])[request.request_id]
        assert together[request.request_id].action_ids == alone.action_ids
        assert len(alone.action_ids) <= request.sampling.max_tokens


def test_seed_decides_the_sample(model, tokenizer):
    first = Request([1, 2, 3], PLAIN, seed=5, request_id="a")
    other = dataclasses.replace(first, seed=6, request_id="b")
    done = run(HFEngine(model, tokenizer), [first, other, dataclasses.replace(first, request_id="c")])
    assert done["a"].action_ids == done["c"].action_ids != done["b"].action_ids


@pytest.mark.parametrize("stop", ["</search>", "ab", "é", " "])
def test_call_ends_with_the_token_that_completes_a_stop_string(stop):
    """A model that always spells the same text, byte by byte or by one tag token."""
    tokenizer = make_tokenizer()
    spelled = tokenizer.encode(f"xy {stop}zz", add_special_tokens=False)
    model, prompt = chain_model(tokenizer, spelled)
    sampling = SamplingParams(max_tokens=20, temperature=0, stop=(stop, "never"))
    completion = run(HFEngine(model, tokenizer), [Request(prompt, sampling, request_id="r")])["r"]
    assert completion.finish_reason == "stop"
    text = tokenizer.decode(completion.action_ids)
    assert text == f"xy {stop}"[: len(text)] and stop in text
    assert stop not in tokenizer.decode(completion.action_ids[:-1])


def test_stop_string_inside_a_longer_token_keeps_the_whole_token():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["a</search>!!"])
    model, prompt = chain_model(tokenizer, tokenizer.convert_tokens_to_ids(["x", "a</search>!!", "y"]))
    sampling = SamplingParams(max_tokens=20, temperature=0, stop=("</search>",))
    completion = run(HFEngine(model, tokenizer), [Request(prompt, sampling, request_id="r")])["r"]
    assert tokenizer.decode(completion.action_ids) == "xa</search>!!"


def test_eos_ends_a_call_and_is_kept():
    tokenizer = make_tokenizer()
    end = tokenizer.eos_token_id
    model, prompt = chain_model(tokenizer, [10, 11, end, 12])
    completion = run(HFEngine(model, tokenizer), [Request(prompt, SamplingParams(9, temperature=0), request_id="r")])[
        "r"
    ]
    assert (completion.action_ids, completion.finish_reason) == ([10, 11, end], "eos")


def test_length_limit_ends_a_call(model, tokenizer):
    completion = run(HFEngine(model, tokenizer, eos_ids=()), [Request([5], SamplingParams(200), request_id="r")])["r"]
    assert (len(completion.action_ids), completion.finish_reason) == (200, "length")


def test_padded_rows_of_the_head_are_never_sampled(tokenizer):
    model = make_model(tokenizer, vocab_size=len(tokenizer) + 64)
    with torch.no_grad():
        model.lm_head.weight[len(tokenizer) :] = 100 * model.lm_head.weight[:64]
    done = run(HFEngine(model, tokenizer), requests(8))
    assert max(max(completion.action_ids) for completion in done.values()) < len(tokenizer)


def test_prompt_that_cannot_fit_names_sizes_and_cure(tokenizer):
    engine = HFEngine(make_model(tokenizer, max_position_embeddings=64), tokenizer)
    with pytest.raises(
        PromptTooLongError, match=r"50 tokens plus max_tokens=24 exceeds .* 64 tokens; lower max_tokens"
    ):
        engine.submit(Request([1] * 50, PLAIN, request_id="long"))
    assert run(engine, [Request([1] * 40, PLAIN, request_id="fits")])["fits"].action_ids


def test_new_weights_are_sampled_from_and_change_the_checksum(tokenizer):
    old, new = make_model(tokenizer, seed=1), make_model(tokenizer, seed=2)
    submitted = requests(4)
    expected = run(HFEngine(new, tokenizer), submitted)
    engine = HFEngine(old, tokenizer)
    before = engine.checksum()
    run(engine, submitted)
    engine.update_weights(new.named_parameters(), version=7)
    assert engine.version == 7
    assert engine.checksum() == weights_checksum(new.named_parameters()) != before
    assert run(engine, submitted) == expected


def test_checksum_notices_swapped_values(tokenizer):
    model = make_model(tokenizer)
    before = weights_checksum(model.named_parameters())
    with torch.no_grad():
        row = model.lm_head.weight[0].clone()
        model.lm_head.weight[0] = model.lm_head.weight[1]
        model.lm_head.weight[1] = row
    assert weights_checksum(model.named_parameters()) != before


def test_weights_that_do_not_fit_are_refused(tokenizer):
    engine = HFEngine(make_model(tokenizer), tokenizer)
    with pytest.raises(EngineError, match=r"'lm_head.weight' of shape \(3,\)"):
        engine.update_weights([("lm_head.weight", torch.zeros(3))], 1)
    with pytest.raises(EngineError, match="no such parameter"):
        engine.update_weights([("nowhere", torch.zeros(3))], 1)


def test_weights_do_not_change_under_a_running_request(model, tokenizer):
    engine = HFEngine(model, tokenizer)
    engine.submit(requests(1)[0])
    with pytest.raises(EngineError, match="in flight"):
        engine.update_weights(model.named_parameters(), 1)


def test_model_is_given_back_as_it_was(tokenizer):
    model = make_model(tokenizer)
    model.train()
    attention = model.config._attn_implementation
    run(HFEngine(model, tokenizer), requests(2))
    assert model.training
    assert model.config._attn_implementation == attention
    model(torch.tensor([[1, 2]])).logits.sum().backward()
    assert model.lm_head.weight.grad is not None


def test_abort_drops_everything_and_the_engine_goes_on(model, tokenizer):
    engine = HFEngine(model, tokenizer, max_batch=2)
    for request in requests(6):
        engine.submit(request)
    engine.poll()
    engine.abort()
    assert engine.poll() == []
    assert set(run(engine, requests(3))) == {"0", "1", "2"}


def test_closed_engine_refuses_work(model, tokenizer):
    engine = HFEngine(model, tokenizer)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.submit(requests(1)[0])


def test_sliding_windows_are_refused(tokenizer):
    model = make_model(tokenizer, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ConfigError, match="sliding_attention"):
        HFEngine(model, tokenizer)


def chain_model(tokenizer: PreTrainedTokenizerFast, spelled: list[int]) -> tuple[Qwen2ForCausalLM, list[int]]:
    """Train nothing: fit the head so that after ``k`` tokens of the chain the model's best token is the next one."""
    prompt = [200]
    model = make_model(tokenizer, seed=3)
    ids = torch.tensor([prompt + spelled])
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[0, :-1]
        targets = torch.zeros(len(spelled), len(tokenizer))
        targets[torch.arange(len(spelled)), torch.tensor(spelled)] = 20.0
        model.lm_head.weight.copy_(torch.linalg.lstsq(hidden, targets).solution.T)
    return model, prompt
