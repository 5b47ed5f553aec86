"""Metrics: snapshots add up over front ends, the page is valid Prometheus text and names only metrics of the table."""

from __future__ import annotations

from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from trireme.engine_core.lifecycle.graph_capture import Captures
from trireme.metrics import BY_NAME
from trireme.serving.engines.engine import EngineState
from trireme.serving.metrics.aggregation import Aggregation
from trireme.serving.metrics.telemetry import Snapshot, Telemetry, merged, page


def telemetry(num: int) -> Telemetry:
    one = Telemetry()
    one.count("trireme_requests|complete", num)
    one.refused("overloaded")
    one.observe("trireme_inter_token_seconds", 0.02, times=num)
    one.open = 1
    return one


def test_snapshots_add_up_and_survive_the_wire() -> None:
    both = [msgspec.msgpack.decode(msgspec.msgpack.encode(telemetry(n).snapshot()), type=Snapshot) for n in (2, 3)]
    total = merged(both)
    assert total.counters["trireme_requests|complete"] == 5
    assert total.gauges["trireme_streams_open"] == 2
    assert sum(total.histograms["trireme_inter_token_seconds"].buckets) == 5
    assert abs(total.histograms["trireme_inter_token_seconds"].total - 0.1) < 1e-9


def test_the_page_parses_and_holds_engines() -> None:
    states = [EngineState(0, True, 2, None, 1, 0.0, ""), EngineState(1, False, -1, None, 0, 0.0, "dead")]
    statistics = {0: {"num_running": 3, "num_waiting": 0, "steps": 9, "blocks_free": 7, "unheard_of": 1}}
    text = page(merged([telemetry(1).snapshot()]), states, statistics, {"version": "1", "model": 'a"b'}).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {name.removesuffix("_info") for name in families} <= set(BY_NAME)
    running = families["trireme_requests_running"].samples
    assert [(sample.labels, sample.value) for sample in running] == [({"engine": "0"}, 3.0)]
    up = {sample.labels["engine"]: sample.value for sample in families["trireme_engine_up"].samples}
    assert up == {"0": 1.0, "1": 0.0}
    (free,) = families["trireme_kv_blocks"].samples
    assert free.labels == {"engine": "0", "state": "free"}
    assert 'trireme_requests_refused_total{code="overloaded"} 1.0' in text
    assert 'trireme_inter_token_seconds_bucket{le="0.025"} 1.0' in text
    assert 'trireme_inter_token_seconds_bucket{le="0.016"} 0.0' in text


def test_what_an_engine_counts_of_its_graphs_is_exported() -> None:
    captures = Captures(lambda args: None)
    worker = {"captured": 34, "dropped": 2, "replays": 900, "padded": 77, "held": 1 << 20, "most_bytes": 1 << 21}
    captures.answered([{**worker, "growth": 1, "capture_s": 0.03, "row_s": 1e-5, "done": ""}], "")
    states = [EngineState(0, True, 2, None, 1, 0.0, "")]
    text = page(
        merged([telemetry(1).snapshot()]), states, {0: captures.counts}, {"version": "1", "model": "m"}
    ).decode()
    for line in (
        "graphs_captured_total 34",
        "graphs_dropped_total 2",
        "graph_replays_total 900",
        "graph_padded_rows_total 77",
        "graph_bytes 1048576",
    ):
        name, value = line.split()
        assert f'trireme_{name}{{engine="0"}} {float(value)}' in text.replace("1.048576e+06", "1048576.0")


async def test_siblings_answer_for_each_other(tmp_path: Path) -> None:
    fronts = [Aggregation(str(tmp_path), i, 3, telemetry(i + 1).snapshot) for i in range(3)]
    await fronts[0].start()
    await fronts[2].start()
    (tmp_path / "front-1.stats").touch()  # a dead one's remains
    seen = await fronts[0].snapshots()
    assert sorted(s.counters["trireme_requests|complete"] for s in seen) == [1, 3]
    await fronts[1].start()
    assert len(await fronts[2].snapshots()) == 3
    for front in fronts:
        front.close()
    assert not list(tmp_path.glob("front-*.stats"))
