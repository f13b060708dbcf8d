"""``kvlink advise``, ``simulate``, ``report`` and ``preflight``: verdicts with their reasons, files, exit codes."""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvlink import cli
from kvlink.cli import preflight
from kvlink.cli.models import MODELS as BENCH_MODELS
from kvlink.cli.plan.options import DEVICE_NAMES, MODEL_NAMES
from kvlink.planning import DEVICES, MODELS, Plan, kv_bytes_per_token
from kvlink.planning.advice import LinkPoint, ReasonName, crossover

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "planning.md").read_text()
COMMANDS = dict(re.findall(r"<!-- run: (\w+) -->\n```sh\nkvlink (.*?)\n```", PAGE))
PNG = b"\x89PNG\r\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder in which the page's commands find what they name."""
    for folder in ("examples", "benchmarks"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(name, *more):
    return cli.main([*shlex.split(COMMANDS[name]), *more])


def plan_in(file):
    return msgspec.json.decode(Path(file).read_bytes(), type=Plan)


def applying(plan):
    return {reason.name for reason in plan.reasons if reason.applies}


# --- the page's commands, one by one ----------------------------------------------------------------------------------


def test_long_prompts_beside_tight_tokens_are_accepted_with_a_crossover(place, capsys):
    assert run("accept") == 0
    plan = plan_in("advice.json")
    assert (plan.verdict, applying(plan)) == ("accept", set())
    assert plan.best_split.configuration == "3 prefill + 1 decode"
    assert plan.decision["keep_split"]
    assert plan.best_split.goodput_rps > plan.baseline.goodput_rps * 1.05
    assert 5 < plan.crossover_gb_s < 12.5
    assert "ACCEPT: 3 prefill + 1 decode" in capsys.readouterr().out


def test_short_prompts_over_a_weak_network_are_rejected_for_their_reasons(place, capsys):
    assert run("reject") == 0
    plan = plan_in("reject.json")
    assert (plan.verdict, applying(plan)) == ("reject", set(ReasonName))
    assert not plan.decision["keep_split"]
    shown = capsys.readouterr().out
    assert "REJECT" in shown
    assert re.search(r"short prompts +yes +median prompt \d+ tokens", shown)


def test_happenings_are_simulated_beside_the_baseline(place):
    assert run("simulate") == 0
    plan = plan_in("storm.json")
    assert (len(plan.splits), plan.links) == (1, ())
    for run_ in (*plan.together, *plan.splits):
        assert run_.requests.done + run_.requests.cancelled == run_.requests.total == 131
        assert run_.requests.cancelled > 0


def test_the_transfer_is_fitted_to_records(place, capsys):
    assert run("records") == 0
    shown = capsys.readouterr().out
    named = re.findall(r"benchmarks/records/\S+\.json", COMMANDS["records"])
    of_limit = [json.loads(Path(name).read_text())["result"]["fraction_of_limit"] for name in named]
    assert (
        f"transfer, fitted to 2 measured_host records of ucx; {min(statistics.median(of_limit), 1):.0%} of the limit, "
        "taken over to a link of 25 GB/s" in shown
    )


def test_a_report_keeps_the_levels_apart(place, capsys):
    example = re.search(r"<!-- example: measured.json -->\n```json\n(.*?)```", PAGE, re.DOTALL)
    Path("measured.json").write_text(example[1])
    assert run("accept", "--quiet") == 0
    run("preflight")
    assert run("report") == 0
    levels = json.loads(Path("report.json").read_text())["levels"]
    assert list(levels) == ["measured_host", "simulated", "environment_preflight"]
    measured = {one["row"]["configuration"]: one for one in levels["measured_host"]}
    assert measured["1 prefill + 1 decode"]["decision"].startswith("keep split: +0.2 /s, p95 -220")
    assert measured["2 co-located"]["decision"] is None
    assert [one["rate_gb_s"] > 0 for name, one in measured.items() if name.startswith("hand-over: fetch")] == [True]
    assert {one["decision"] for one in levels["simulated"]} == {None, "accept"}
    page = Path("report.html").read_text()
    for level, rows in levels.items():
        table = page.split(f"<h2>{level}</h2>")[1].split("</table>")[0]
        assert table.count("<tr>") == 1 + len(rows)
        assert set(re.findall(r"measured_host|simulated|environment_preflight", table)) == {level}
    shown = capsys.readouterr().out
    assert "backend engine 1.0, CPU, model a-small-model" in shown
    assert re.search(r"configuration +TTFT ms +TPOT ms +throughput +P95 ms +hand-over ms +peak GiB +decision", shown)


def test_two_servers_that_were_measured_stand_beside_a_simulation_of_the_same_trace(place):
    record = json.loads(Path("benchmarks/records/vllm-split.json").read_text())
    for turn in record["turns"]:
        loads = turn["requests"] if turn["configuration"] == "1 prefill + 1 decode" else 0
        assert (turn["kv_loads"], turn["kv_load_bytes"] > 0) == (
            loads,
            loads > 0,
        )  # split is split, and the other is not
    assert run("workload", "--quiet") == 0
    assert run("beside") == 0
    levels = json.loads(Path("beside.json").read_text())["levels"]
    assert list(levels) == ["measured_host", "simulated"]
    together, split = levels["measured_host"]
    assert (together["row"]["configuration"], together["decision"]) == ("2 co-located", None)
    assert split["row"]["compares_to"] == "2 co-located"
    assert split["row"]["hand_over_ms"] > 0
    assert "hand_over_ms" not in together["row"]
    assert levels["simulated"][0]["row"]["configuration"].startswith("2 co-located")
    assert levels["simulated"][-1]["row"]["configuration"] == "1 prefill + 1 decode"
    rows = [one["row"] for ones in levels.values() for one in ones]
    for field in ("prompt_tokens", "decode_tokens", "workers"):
        assert len({round(row[field], 6) for row in rows}) == 1, f"not one workload: {field}"
    for row in rows:
        assert all(row[field] > 0 for field in ("ttft_ms", "tpot_ms", "throughput_rps", "p95_latency_ms"))
    page = Path("beside.html").read_text()
    for level, ones in levels.items():
        table = page.split(f"<h2>{level}</h2>")[1].split("</table>")[0]
        assert table.count("<tr>") == 1 + len(ones)
        assert set(re.findall(r"measured_host|simulated", table)) == {level}
        assert Path(f"plots/serving-{level}.png").read_bytes().startswith(PNG)
    shown = measured_in_page(split["row"]), measured_in_page(together["row"])
    assert all(text in PAGE for text in shown), shown


def measured_in_page(row):
    """A measured row as the page's table tells it."""
    figures = (row.get(name) for name in ("ttft_ms", "tpot_ms", "throughput_rps", "p95_latency_ms", "hand_over_ms"))
    cells = ["" if figure is None else f"{figure:.3g}" if figure < 100 else f"{figure:.0f}" for figure in figures]
    return f"| {row['configuration']} | {' | '.join(cells)} |".replace("|  |", "| |")


def test_the_page_shows_no_command_that_is_not_run_here():
    assert set(COMMANDS) == {
        "accept", "reject", "simulate", "records", "preflight", "report", "workload", "beside",
    }  # fmt: skip
    shown = re.findall(r"^kvlink (.*)$", PAGE, re.MULTILINE)
    assert sorted(shown) == sorted(COMMANDS.values())


def test_the_example_prints_what_its_comments_say():
    example = ROOT / "examples" / "planning.py"
    ran = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.splitlines() == [
        "{'prefill_heavy': 1, 'decode_heavy': 1, 'mixed': 1}",
        "{'prefill_pool': ['summary'], 'decode_pool': ['story'], 'shared_pool': ['chat']}",
        "True",
    ]


# --- files ------------------------------------------------------------------------------------------------------------

QUICK = ["synthetic:rate=2,prompt=900,decode=20,requests=40", "--workers", "2", "--quiet"]


def test_the_page_needs_nothing_beside_it_and_plots_are_png(place):
    Path("plots").mkdir()
    assert cli.main(["advise", *QUICK, "--html", "a.html", "--png", "plots"]) == 0
    page = Path("a.html").read_text()
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", page)
    assert "<script" not in page
    assert page.count('src="data:image/png;base64,') == 2
    assert {path.name for path in Path("plots").iterdir()} == {"latency.png", "links.png"}
    assert all(path.read_bytes().startswith(PNG) for path in Path("plots").iterdir())


def test_a_hostile_name_is_text_on_the_page(place):
    Path("<b>x.csv").write_text("ContextTokens,GeneratedTokens\n900,9\n800,8\n")
    assert cli.main(["simulate", "<b>x.csv", "--workers", "2", "--html", "a.html"]) == 0
    assert "&lt;b&gt;x" in Path("a.html").read_text()
    assert "<b>x" not in Path("a.html").read_text()


def test_the_same_command_gives_the_same_bytes_under_any_hash_seed(place):
    outputs = set()
    for seed in ("0", "1"):
        command = [sys.executable, "-m", "kvlink.cli", "simulate", "examples/traces/chat.jsonl", "--workers", "3",
                   "--fail", "0@9+5", "--cancelled", "0.1", "--html", "a.html", "--json", "-"]  # fmt: skip
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(cli.__file__).parent.parent.parent)}
        ran = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=100)
        assert ran.stderr == b""
        outputs.add((ran.stdout, Path("a.html").read_bytes()))
    assert len(outputs) == 1


@pytest.mark.parametrize("table", [
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,900,44\n2023-11-16 18:17:05.0000000,800,9\n",
    "Timestamp,Model,Request tokens,Response tokens\n5,x,900,44\n6.5,x,800,0\n",
    "prompt_tokens,decode_tokens\n900,44\n800,9\n",
])  # fmt: skip
def test_public_tables_are_read(place, table):
    Path("t.csv").write_text(table)
    assert cli.main(["simulate", "t.csv", "--workers", "2", "--json", "p.json"]) == 0
    plan = plan_in("p.json")
    assert plan.workload.requests == 2
    assert plan.workload.prompt_tokens.p50 == 800
    assert plan.workload.seconds > 0


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["advise", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["advise", "synthetic:rate=2"], "prompt is missing"),
        (["advise", "synthetic:speed=2"], "give rate, prompt"),
        (["advise", "synthetic:prompt=x,decode=1"], "no number behind its ="),
        (["advise", "synthetic:prompt=1,decode=1,rate=0"], "rate is 0"),
        (["advise", "synthetic:prompt=1,decode=1,requests=1e9"], "requests is 1000000000"),
        (["advise", *QUICK, "--workers", "1"], "--workers 1"),
        (["advise", *QUICK, "--ratios", "2"], "--ratios 2"),
        (["advise", *QUICK, "--ratios", "a"], "numbers with commas"),
        (["advise", *QUICK, "--links-gb-s", "0"], "--links-gb-s is 0"),
        (["advise", *QUICK, "--devices", "1"], "do not fit into 1 x h100-sxm"),
        (["advise", *QUICK, "--ttft-slo", "nan"], "--ttft-slo is nan"),
        (["advise", *QUICK, "--attainment", "95"], "--attainment is 95"),
        (["advise", *QUICK, "--png", "a-file"], "--png a-file cannot be a folder"),
        (["advise", *QUICK, "--png", "a-file/plots"], "--png a-file/plots cannot be a folder: "),
        (["advise", *QUICK, "--html", "nowhere/a.html"], "--html nowhere/a.html cannot be written"),
        (["simulate", *QUICK, "--prefill-workers", "2"], "--prefill-workers 2"),
        (["advise", *QUICK, "--long-prompt", "-1"], "long_prompt_threshold is -1"),
        (["simulate", *QUICK, "--switch-at", "-1"], "switch: give a time"),
        (["simulate", *QUICK, "--cancelled", "nan"], "cancelled is nan"),
        (["simulate", *QUICK, "--faster", "nan"], "rate factor is nan"),
        (["simulate", *QUICK, "--fail", "0@x+1"], "WORKER@AT+DOWN"),
        (["simulate", *QUICK, "--fail", "7@1+1"], "failure of worker 7"),
        (["simulate", *QUICK, "--records", "nowhere.json"], "nowhere.json cannot be read"),
        (["report", "nowhere.json"], "nowhere.json cannot be read"),
        (["preflight", "--memory-gib", "-1"], "--memory-gib is -1"),
    ],
)
def test_a_bad_argument_ends_with_2_and_its_name(place, capsys, arguments, message):
    Path("a-file").touch()
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_what_is_refused_leaves_no_files_and_no_folder_and_nothing_less(place, capsys):
    """Where the results were to go looks as it did, with a link to a file to come and a file that was there."""
    Path("kept.json").write_text("{}")
    Path("later.html").symlink_to("not-yet.html")
    before = {path.name for path in place.iterdir()}
    for outputs in (
        ["--json", "new.json", "--html", "new.html", "--png", "plots/deep"],
        ["--json", "kept.json", "--html", "later.html"],
    ):
        assert cli.main(["report", "nowhere.json", *outputs]) == 2
        assert "nowhere.json cannot be read" in capsys.readouterr().err
    assert {path.name for path in place.iterdir()} == before
    assert Path("kept.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", '{"input_length": 1, "output_length": 1}\n{"input_length": -1, "output_length": 1}\n', "line 2"),
        ("t.jsonl", '{"input_length": 1}\n', "line 1 is no request"),
        ("t.jsonl", "[" * 100_000, "line 1 is no request"),
        ("t.jsonl", "\n\n", "holds no request"),
        ("t.jsonl", '{"input_length": 1, "output_length": 1, "timestamp": 1e999}\n', "line 1 is no request"),
        ("t.csv", "ContextTokens,GeneratedTokens\n" + "1" * 200_000 + ",2\n", "is no table"),
        ("t.csv", "ContextTokens,GeneratedTokens\n1e999,2\n", "line 2 is no request"),
        ("t.csv", "a,b\n1,2\n", "none of the columns ContextTokens"),
        ("t.csv", "ContextTokens,GeneratedTokens\n1,2\n3,-4\n", "line 3 is no request"),
        ("t.csv", "ContextTokens,GeneratedTokens\n1\n", "line 2 is no request"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,1\n", "line 2 is no request"),
    ],
)
def test_a_bad_trace_ends_with_2_and_its_line(place, capsys, name, content, message):
    Path(name).write_text(content)
    assert cli.main(["advise", name]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told) < 1000


ROW = {"configuration": "a", "throughput_rps": 1, "p95_latency_ms": 1}


def measured(*rows, level="stand_in"):
    return {"schema": "kvlink.experiment/1", "evidence_level": level, "rows": rows}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"schema": "kvlink.other/1"}, "has schema 'kvlink.other/1'"),
        (measured(ROW, level="simulated"), "evidence_level"),
        (measured({**ROW, "ttft": 1}), "unknown field"),
        (measured({**ROW, "ttft_ms": -1}), "ttft_ms"),
        (measured(), "length >= 1"),
        (measured({**ROW, "compares_to": "b"}), "compares_to 'b'"),
        (measured(ROW, {"configuration": "b", "compares_to": "a"}), "throughput is missing in request 'b'"),
        ({"schema": "kvlink.plan/1"}, "missing required field"),
        ({"x": 1}, "has no `schema`; known are kvlink.plan/1, kvlink.bench/1"),
        ({"result": {"x": 1}}, "has no `schema`"),
        ([], "Expected `object`"),
    ],
)
def test_a_result_that_is_none_ends_with_2(place, capsys, result, message):
    Path("r.json").write_text(json.dumps(result))
    assert cli.main(["report", "r.json"]) == 2
    assert message in capsys.readouterr().err


# --- pieces -----------------------------------------------------------------------------------------------------------


def test_names_are_those_of_the_tables_and_bench_has_the_same_geometry():
    """The command line lists names without loading the tables, and the bench has geometries of its own."""
    assert (tuple(sorted(MODELS)), tuple(sorted(DEVICES))) == (MODEL_NAMES, DEVICE_NAMES)
    for name, geometry in BENCH_MODELS.items():
        held = geometry.kv_heads * geometry.head_elements * geometry.dtype.itemsize
        assert held == kv_bytes_per_token(MODELS[name])


def link(rate, goodput):
    return LinkPoint(link_gb_s=rate, goodput_rps=goodput, ttft_p95=None, e2e_p95=None)


def test_the_crossover_lies_between_two_rates_on_a_logarithmic_axis():
    assert crossover([link(1, 0), link(100, 2), link(200, 3)], 1.0) == pytest.approx(10)
    assert crossover([link(1, 2), link(10, 3)], 1.0) is None
    assert crossover([link(1, 0), link(10, 0.5)], 1.0) is None
    assert crossover([], 1.0) is None


def test_a_machine_without_an_engine_is_told_what_is_missing(place, capsys, monkeypatch):
    monkeypatch.setattr(preflight, "_version", lambda package: None)
    assert cli.main(["preflight", "--json", "p.json"]) == 3
    record = json.loads(Path("p.json").read_text())
    assert (record["evidence_level"], record["able"], record["comparison"]) == ("environment_preflight", False, None)
    assert record["missing"][:2] == ["engine", "torch"]
    assert "engine is missing: pip install vllm" in capsys.readouterr().err


def test_a_machine_with_an_engine_and_memory_is_able_on_cpus(place, monkeypatch):
    monkeypatch.setattr(preflight, "_version", lambda package: "1.0")
    monkeypatch.setattr(preflight, "_memory_gib", lambda: 8.0)
    monkeypatch.setattr(preflight.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(preflight, "_gpus", lambda: ["one GPU, 80 GiB"])
    assert cli.main(["preflight", "--json", "p.json"]) == 0
    assert json.loads(Path("p.json").read_text())["comparison"] == "cpu"
    monkeypatch.setattr(preflight, "_gpus", lambda: ["one", "two"])
    assert preflight.examine().comparison == "gpu"
    assert preflight.examine(memory_gib=9.0).missing == ("memory",)


def test_without_simpy_or_matplotlib_the_extra_is_named(place, capsys, monkeypatch):
    for module, output in (("simpy", []), ("matplotlib", ["--html", "a.html"])):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            assert cli.main(["simulate", *QUICK, *output]) == 3
        assert "pip install 'kvlink[plan]'" in capsys.readouterr().err
