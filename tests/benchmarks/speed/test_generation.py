from __future__ import annotations

import json

from memopd_benchmarks.speed import generation


def test_both_players_sample_every_token_asked_for(tmp_path, monkeypatch, capsys):
    output = tmp_path / "generation.json"
    sizes = ["--layers", "1", "--width", "32", "--heads", "1", "--prompt", "3", "9", "--tokens", "6"]
    counted = []
    measured = generation._measured

    def counting(play, model, tokenizer, prompts, batch, tokens):
        counted.append((play(model, tokenizer, prompts, batch, tokens), len(prompts) * tokens))
        return measured(play, model, tokenizer, prompts, batch, tokens)

    monkeypatch.setattr(generation, "_measured", counting)
    generation.main([*sizes, "--batches", "1", "3", "--requests", "5", "--output", str(output)])
    assert all(sampled == wanted for sampled, wanted in counted)
    rows = json.loads(output.read_text())["rows"]
    players = ["HFEngine", "transformers.generate"]
    assert [(row["batch"], row["player"]) for row in rows] == [
        (batch, player) for batch in (1, 3) for player in players
    ]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert "HFEngine" in capsys.readouterr().out
