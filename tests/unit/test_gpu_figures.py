"""The figures' script end to end on a tiny shape, on the CPU."""

from __future__ import annotations

from scripts.gpu_figures import main


def test_every_kind_of_figure_is_measured(capsys):
    figures = "step:2,step:1x40,prefill:2x64,requests:3x20x4"
    rows = main(["--shape", "tiny", "--device", "cpu", "--steps", "6", "--max-len", "256", "--figures", figures])
    assert [row["figure"] for row in rows] == figures.split(",")
    assert {"step_ms", "first_ms", "output_tok_s"} <= set(rows[0])
    assert rows[2]["prefill_tok_s"] > 0
    assert rows[3]["total_tok_s"] > rows[3]["output_tok_s"] > 0
    assert "started in" in capsys.readouterr().out
