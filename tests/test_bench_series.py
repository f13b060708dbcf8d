"""Sweeps, repeats and what is made of them: JSON, CSV, a page, a picture."""

from __future__ import annotations

import csv
import io
import json
import re
import struct
import xml.etree.ElementTree as ET

import pytest

from kvlink.cli import main
from kvlink.cli.bench import plot
from kvlink.cli.bench.chart import chart, size_label

TINY = [
    "bench", "--transport", "loopback", "--layers", "2", "--kv-heads", "2", "--head-dim", "16", "--requests", "2",
    "--tokens", "64", "--source-tp", "1", "--target-tp", "1", "--quiet",
]  # fmt: skip


def run(capsys, *flags: str) -> tuple[int, str, str]:
    code = main([*TINY, *flags])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_sweep_doubles_and_repeats_go_round_the_points(capsys):
    code, out, err = run(capsys, "--sweep", "tokens=32:200", "--repeat", "2", "--json", "-")
    assert code == 0, err
    series = json.loads(out)
    assert series["schema"] == "kvlink.bench.series/1"
    assert series["sweep"] == {"name": "tokens", "values": [32, 64, 128]}
    assert series["verified"] is True
    assert [report["case"]["tokens"] for report in series["reports"]] == [32, 64, 128, 32, 64, 128]
    assert all(report["schema"] == "kvlink.bench/1" for report in series["reports"])
    assert all(0 <= phase["p50"] <= phase["p95"] <= phase["p99"] for phase in series["reports"][0]["phases_s"].values())


def test_run_bytes_are_swept_by_the_block_size(capsys):
    code, out, err = run(capsys, "--sweep", "run-bytes=256:1024", "--json", "-")
    assert code == 0, err
    reports = json.loads(out)["reports"]
    assert [report["runs"]["bytes"] for report in reports] == [256, 512, 1024]
    assert [report["case"]["source"]["block_size"] for report in reports] == [4, 8, 16]


def test_csv_has_a_row_a_run_and_the_unit_in_a_columns_name(capsys):
    code, out, _ = run(capsys, "--repeat", "3", "--csv", "-")
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 3
    assert float(rows[0]["throughput_gb_s.median"]) > 0
    assert rows[0]["verified"] == "True"
    assert float(rows[0]["phases_s.wire.p95"]) >= 0


def test_the_page_needs_nothing_else_and_tells_every_point(capsys, tmp_path):
    file = tmp_path / "bench.html"
    code, out, _ = run(capsys, "--sweep", "tokens=32:64", "--html", str(file))
    assert code == 0
    assert "GB/s" in out
    text = file.read_text()
    assert not any(word in text for word in ("<script", "<link", "src=", "@import"))
    assert "compared and right" in text
    assert "KV of a request" in text
    assert "limit: one thread" in text
    assert "alternating; median of 2 pairs" in text
    assert re.search(r"<tr><td>1</td><td>32</td><td>local</td><td>2</td>", text)  # run, tokens, path, done
    assert re.search(r"<th>run</th>.*<th>wire</th>", text)
    assert re.search(r"<td>\d+ / \d+ / \d+</td>", text)
    (svg,) = [part.split("</svg>")[0] for part in text.split("<svg")[1:]]
    assert svg.count("<circle") == 4  # two points, and two of the limit


def test_the_plot_is_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.png"
    code, _, err = run(capsys, "--sweep", "tokens=32:64", "--plot", str(file))
    assert code == 0, err
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 600
    assert height > 400


def test_each_run_of_a_series_is_announced_with_its_point_unless_it_is_to_be_quiet(capsys):
    sweep = ["--sweep", "concurrency=1:2", "--requests", "3"]
    assert main([*TINY[:-1], *sweep]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == ["concurrency=1: run 1 of 2", "concurrency=2: run 2 of 2"]
    assert main([*TINY, *sweep]) == 0
    assert not capsys.readouterr().err
    assert main([*TINY[:-1], "--csv", "-"]) == 0
    assert not capsys.readouterr().err  # one run needs no number


def test_a_point_that_does_not_fit_this_machine_is_named_before_any_is_run(capsys):
    code, out, err = run(capsys, "--sweep", "tokens=65536:16777216", "--layers", "64", "--kv-heads", "64")
    assert code == 3
    assert not out
    assert re.search(r"kvlink bench: tokens=\d+: this bench needs .* GB of memory", err)


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda _name: None)
    code, _, err = run(capsys, "--sweep", "tokens=32:64", "--plot", str(tmp_path / "x.png"))
    assert code == 3
    assert "kvlink[plot]" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--sweep", "tokens"], "--sweep is 'tokens'"),
        (["--sweep", "heads=1:2"], "--sweep is 'heads=1:2'"),
        (["--sweep", "tokens=8:4"], "--sweep is 'tokens=8:4'"),
        (["--sweep", "tokens=0:4"], "--sweep is 'tokens=0:4'"),
        (["--sweep", "tokens=1:999999999"], "--tokens is"),
        (["--sweep", "tokens=1:" + "9" * 30], "at most 40"),
        (["--sweep", "run-bytes=100:200"], "takes 64 bytes"),
        (["--sweep", "run-bytes=64:128", "--target-layout", "hnd"], "same TP, PP and layout"),
        (["--sweep", "tokens=1:2", "--trace", "x"], "--trace"),
        (["--repeat", "0"], "--repeat is 0"),
        (["--plot", "x.png"], "give --sweep too"),
        (["--repeat", "2", "--json", "-", "--csv", "-"], "only one"),
        (["--repeat", "2", "--csv", "/nonexistent/x.csv"], "--csv /nonexistent/x.csv cannot be written"),
        (["--repeat", "2", "--serve", "127.0.0.1:0"], "--serve lends"),
        (["--repeat", "2", "--compare", "nixl"], "--compare runs at one run length"),
        (["--stay"], "give --serve too"),
        (["--sweep", "tokens=1:2", "--plot", "x"], "--plot x: its ending"),
        (["--sweep", "tokens=1:2", "--plot", "x.gpj"], "give .png"),
    ],
)  # fmt: skip
def test_a_series_that_makes_no_sense_is_refused_by_its_flag(capsys, flags, words):
    code, _, err = run(capsys, *flags)
    assert code == 2
    assert words in err


def test_a_chart_has_its_axes_named_and_its_lines_in_the_legend():
    svg = chart(
        {"a & b": [(64, 1.0), (4096, 3.2)], "limit": [(64, 4.0)]}, x_title="bytes", y_title="GB/s", x_tick=size_label
    )
    root = ET.fromstring(svg)
    words = [element.text for element in root.iter() if element.text and element.text.strip()]
    assert {"a & b", "limit", "bytes", "GB/s", "64 B", "4 KiB", "0", "4"} <= set(words)
    heights = [float(circle.get("cy")) for circle in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert heights[2] < heights[1] < heights[0]  # more is higher
