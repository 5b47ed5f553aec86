"""The figures' script end to end on a tiny shape, on the CPU."""

from __future__ import annotations

from scripts.gpu_figures import SHAPES, main, write_shape
from trireme.launch.bench.samples import make_text
from trireme.model.files import find_model
from trireme.serving.text.tokens import load_tokenizer


def test_every_kind_of_figure_is_measured(capsys):
    figures = "step:2,step:1x40,prefill:2x64,requests:3x20x4"
    rows = main(["--shape", "tiny", "--device", "cpu", "--steps", "6", "--max-len", "256", "--figures", figures])
    assert [row["figure"] for row in rows] == figures.split(",")
    assert {"step_ms", "first_ms", "output_tok_s"} <= set(rows[0])
    assert rows[2]["prefill_tok_s"] > 0
    assert rows[3]["total_tok_s"] > rows[3]["output_tok_s"] > 0
    assert "started in" in capsys.readouterr().out


def test_starts_and_http_clients_have_servers_of_their_own(capsys):
    figures = "http:1x16x8,start,http:2x16x8,http:2"
    rows = main(["--shape", "tiny", "--device", "cpu", "--steps", "6", "--max-len", "256", "--figures", figures])
    names = ["start cold", "start warm", "http:1x16x8", "http:2x16x8", "http:2x128x6"]
    assert [row["figure"] for row in rows] == names
    for row in rows[:2]:
        assert row["total_s"] > row["weights_s"] > 0
        assert row["total_s"] > row["first_token_s"] > 0
    for row in rows[2:]:
        assert row["errors"] == 0
        assert row["output_tok_s"] > 0
        assert row["ttft_p50_ms"] > row["tpot_p50_ms"] > 0
    assert "started in" not in capsys.readouterr().out  # no engine beside the servers


def test_clients_words_are_a_token_each(tmp_path):
    write_shape("tiny", tmp_path)
    tokenizer = load_tokenizer(find_model(tmp_path, weightless=True))
    assert tokenizer.vocab_size == SHAPES["tiny"]["vocab_size"]
    first, second = (tokenizer.encode(make_text(128, seed)).tolist() for seed in (1, 2))
    assert len(first) == len(second) == 128
    assert 0 not in first
    assert first[:16] != second[:16]
