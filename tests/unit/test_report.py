"""Reports and what they are made of: sweeps, ratios of pairs, start-up phases, plots that no file can inject into."""

from __future__ import annotations

import json
import os
from xml.etree import ElementTree

import pytest

from trireme.errors import ConfigError
from trireme.launch.api.startup import breakdown, lives_of
from trireme.launch.bench.samples import ratio_row
from trireme.launch.bench.serve import steps_of
from trireme.launch.bench.startup import phases_of, tree_memory
from trireme.launch.cli import main
from trireme.launch.commands.serve import timeline
from trireme.launch.plot import Line, _ceiling, bars, lines
from trireme.launch.processes.events import AllReady
from trireme.transport.wire.messages import Ready


def result(path, scale: float, name: str = "trireme c=1") -> str:
    rows = [
        {
            "name": name,
            "series": "trireme",
            "clients": c,
            "output_tok_s": 50.0 * c**0.5 * scale,
            "ttft_p50_ms": 9.0 * c / scale,
        }
        for c in (1, 2, 4, 64)
    ]
    path.write_text(json.dumps({"command": "bench sweep", "model": "m", "rows": rows, "version": "0.1"}))
    return str(path)


def test_a_report_of_two_runs_says_which_is_better(tmp_path, capsys):
    words = ["report", result(tmp_path / "a.json", 1.0), result(tmp_path / "b.json", 1.5)]
    assert main([*words, "--output", str(tmp_path / "out.html")]) == 0
    text = (tmp_path / "out.html").read_text()
    assert text.count("<svg") == 2
    assert text.count("class='better'") == 8
    assert "<td>1.500" in text
    assert "http://www.w3.org/2000/svg" in text
    assert "src=" not in text
    assert "<script" not in text
    assert "href=" not in text
    assert main([*words[:2], "--output", "-"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("</html>")


def test_nothing_from_a_file_becomes_markup(tmp_path):
    evil = "</td><script>alert(1)</script>"
    main(["report", result(tmp_path / "a.json", 1.0, evil), "--output", str(tmp_path / "out.html")])
    text = (tmp_path / "out.html").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize("text", ["", "[]", '{"command": 1}', '{"command": "x", "model": "m", "rows": [[]]}'])
def test_files_that_are_no_results(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    assert main(["report", str(tmp_path / "a.json")]) == ConfigError.exit_code
    assert main(["report", str(tmp_path / "none.json")]) == ConfigError.exit_code
    assert main(["report"]) == ConfigError.exit_code


def test_plots_are_well_formed_and_within_their_frame():
    curves = [Line("a <b>", {1: 5.0, 8: 40.0, 64: 60.0}), Line("c", {1: 0.0, 64: 99.0})]
    for text in (lines(curves, "clients"), bars(curves)):
        svg = ElementTree.fromstring(text)
        _, _, width, height = map(float, svg.attrib["viewBox"].split())
        for node in svg.iter("{http://www.w3.org/2000/svg}circle"):
            assert 0 <= float(node.attrib["cx"]) <= width
            assert 0 <= float(node.attrib["cy"]) <= height
    assert [_ceiling(v) for v in (0, 0.7, 1, 1.2, 2.3, 26, 999)] == [1, 1, 1, 2, 2.5, 50, 1000]


def test_ratios_are_medians_of_pairs_and_leave_counts_out():
    pairs = [
        ({"clients": 8.0, "output_tok_s": a, "errors": 0.0}, {"output_tok_s": b}) for a, b in ((4, 2), (9, 3), (20, 4))
    ]
    row = ratio_row("x", pairs)
    assert row.figures == {"output_tok_s": 3.0}


def test_steps_of_a_sweep():
    assert [s.name for s in steps_of({"concurrency": ("1", "32")})] == ["c=1", "c=32"]
    assert [s.name for s in steps_of({"concurrency": ("1",), "rate": ("0.5", "2")})] == ["r=0.5/s", "r=2/s"]
    assert [s.amount for s in steps_of({"concurrency": (), "rate": ()})] == [1, 2, 4, 8, 16, 32]
    for words in (("x",), ("0",), ("-1",)):
        with pytest.raises(ConfigError, match="--concurrency"):
            steps_of({"concurrency": words})


def test_phases_of_a_start_add_up_to_its_wall_time():
    ready = {"engine-0": Ready("engine-0", {}, {"weights": 3.0, "kv": 0.5}, began=100.5), "front-0": Ready("front-0")}
    event = AllReady(("127.0.0.1", 8000), ready, 4.0, {"engine-0": 104.4, "front-0": 104.9}, [], {"engine-0": 100.2})
    parts = breakdown(100.1, lives_of(event.parts, event.born_at), 105.0, "fronts")
    stamps = {name: float(value) for name, value in timeline(event, 100.1, parts).items()}
    assert stamps["port"] == 8000
    figures = phases_of(100.0, stamps, 105.5)
    spans = {"launcher_s": 0.2, "process_s": 0.3, "weights_s": 3.0, "kv_s": 0.5, "fronts_s": 1.0, "first_token_s": 0.5}
    assert figures == pytest.approx({**spans, "total_s": 5.5, "front_ready_s": 4.9})
    assert sum(spans.values()) == pytest.approx(5.5)


def test_memory_of_a_process_tree():
    memory = tree_memory(os.getpid())
    assert memory.resident >= memory.own > 1 << 20
    assert tree_memory(2**22 + 1).resident == 0
