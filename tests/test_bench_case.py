"""The command line of a bench, and how a case is cut into rounds and pools."""

from __future__ import annotations

import argparse
import json

import pytest

from kvlink import cli, limits
from kvlink.cli.bench import blocks as blocks_module
from kvlink.cli.bench import peers
from kvlink.cli.bench.blocks import BlockPool, check_memory, pool_blocks
from kvlink.cli.bench.case import ROUND_BYTES
from kvlink.cli.bench.options import add_parser, parse
from kvlink.cli.bench.ranks import check_claims
from kvlink.cli.bench.serve import split_address
from kvlink.errors import ConfigError, UnavailableError


def options(*flags: str):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parse(parser.parse_args(["bench", *flags]))


def test_the_defaults_are_a_sharded_model_of_known_geometry():
    case = options().case
    assert case.payload_token_bytes == 32 * 2 * 8 * 128 * 2
    assert (case.source.tp, case.target.tp, case.transport, case.integrity) == (2, 2, "ucx", True)
    assert case.requests == 16
    assert case.limit_check


def test_a_model_can_be_cut_and_changed_by_flags():
    geometry = options("--model", "llama-3-70b", "--layers", "3", "--kv-heads", "2", "--dtype", "int8").case.geometry
    assert (geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.head_elements) == (3, 2, 128, 3 * 2 * 128)


def test_a_trace_gives_its_first_prompts_and_the_first_of_them_to_warm_up(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": 0, "input_length": n}) + "\n" for n in (10, 20, 30, 40)))
    case = options("--trace", str(trace), "--requests", "3").case
    assert case.prompts == (10, 10, 20, 30)
    assert case.requests == 3
    assert options("--trace", str(trace), "--warmup", "0").case.prompts == (10, 20, 30, 40)


@pytest.mark.parametrize(
    "flags",
    [
        ("--transport", "loopback", "--fault", "lose=0.1"),
        ("--transport", "loopback", "--fault", "drop=2"),
        ("--transport", "loopback", "--fault", "drop"),
        ("--fault", "drop=0.1"),
        ("--tries", "0"),
        ("--topology", "ring:3"),
        ("--topology", "pairwise"),
        ("--topology", "pairwise:0"),
        ("--topology", "many-to-one:65"),
        ("--topology", "many-to-one:2", "--flow", "push"),
        ("--topology", "many-to-one:2", "--transport", "loopback"),
        ("--topology", "many-to-one:2", "--connect", "127.0.0.1:1"),
        ("--transport", "loopback", "--kill-target-every", "1"),
        ("--concurrency", "2", "--kill-target-every", "1"),
        ("--serve", "127.0.0.1:1", "--kill-target-every", "1"),
        ("--kill-target-every", "100"),
        ("--kill-target-every", "1", "--tries", "1"),
        ("--layer-ms", "3"),
        ("--flow", "push", "--layer-ms", "-1"),
    ],
)
def test_faults_and_tries_that_make_no_sense_are_refused_by_their_flag(flags):
    with pytest.raises(ConfigError, match=flags[-2]):
        options(*flags)


@pytest.mark.parametrize(
    ("line", "word"),
    [("{", "line 2"), ('{"input_length": "x"}', "line 2"), ("[]", "line 2"), ('{"input_length": -1}', "--tokens")],
)
def test_a_bad_trace_is_refused_by_its_line(tmp_path, line, word):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_length": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=word):
        options("--trace", str(trace))


def test_a_trace_line_nested_without_end_is_refused_by_its_line(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    deep = "[" * 100_000 + "]" * 100_000
    trace.write_text('{"input_length": 1}\n{"input_length": 1, "x": ' + deep + "}\n")
    assert cli.main(["bench", "--trace", str(trace)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "line 2" in line


@pytest.mark.parametrize(
    "flags",
    [
        ["--tokens", "0"], ["--requests", "0"], ["--warmup", "-1"], ["--requests", "100001"], ["--warmup", "100001"],
        ["--requests", "9" * 30], ["--warmup", "9" * 30], ["--layers", "0"], ["--source-pp", "33"],
        ["--target-tp", "0"], ["--source-block-size", "0"], ["--concurrency", "0"], ["--trace", "/nonexistent"],
        ["--transport", "loopback", "--process-per-rank"], ["--json", "/nonexistent/x.json"],
    ],
)  # fmt: skip
def test_bad_arguments_end_with_code_2_and_one_line(flags, capsys):
    assert cli.main(["bench", *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_an_unknown_flag_ends_with_code_2():
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "--no-such-flag"])
    assert ended.value.code == 2


def test_one_request_in_flight_makes_rounds_of_one():
    rounds = list(options("--requests", "3", "--warmup", "2", "--tokens", "8").case.rounds())
    assert [r.requests for r in rounds] == [(0,), (1,), (2,), (3,), (4,)]
    assert [r.warmup for r in rounds] == [True, True, False, False, False]


def test_rounds_keep_requests_in_flight_within_the_bound():
    case = options("--requests", "40", "--concurrency", "4", "--tokens", "4096").case
    rounds = [r.requests for r in case.rounds() if not r.warmup]
    assert [i for batch in rounds for i in batch] == list(range(1, 41))
    assert all(sum(map(case.request_bytes, batch)) <= ROUND_BYTES for batch in rounds)
    assert all(4 <= len(batch) <= 16 for batch in rounds[:-1])


def test_a_pool_holds_its_fullest_round_with_spares_and_exceeds_the_cache(monkeypatch):
    monkeypatch.setattr(blocks_module, "last_level_cache_bytes", lambda: 1024**2)
    case = options("--tokens", "1000", "--source-block-size", "16").case
    assert pool_blocks(case, "source") == 63 + 15 + 1
    monkeypatch.setattr(blocks_module, "last_level_cache_bytes", lambda: 1024**3)
    assert pool_blocks(case, "source") * 16 * case.side_token_bytes("source") >= 4 * 1024**3


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_round_of_more_blocks_than_any_pool_is_refused_by_the_flags_to_change(side, capsys):
    flags = ["--tokens", "2000", f"--{side}-block-size", "1", "--layers", "1", "--kv-heads", "2", "--head-dim", "8"]
    assert pool_blocks(options(*flags, "--concurrency", "500", "--requests", "500").case, side) <= 1 << 20
    assert cli.main(["bench", *flags, "--concurrency", "600", "--requests", "600"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in ("1200000", "1048576", f"--{side}-block-size", "--tokens", "--concurrency"))


def test_a_claim_larger_than_a_peer_reads_is_refused_before_anything_starts(capsys):
    flags = ["--layers", "1", "--kv-heads", "2", "--head-dim", "8"]
    assert cli.main(["bench", *flags, "--tokens", str(1 << 24), "--source-block-size", "64"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in (str(limits.MAX_CLAIM_BYTES - 1), "--source-block-size", "--tokens"))
    check_claims(options(*flags, "--tokens", str(1 << 24), "--source-block-size", "128").case, 1 << 18)
    check_claims(options(*flags, "--tokens", str(1 << 24), "--flow", "push").case, 1 << 20)


def test_a_claim_with_more_ranks_and_layers_than_fit_is_refused_by_its_flag():
    case = options("--layers", "1024", "--source-tp", "1024", "--tokens", "64").case
    with pytest.raises(ConfigError, match="--source-tp"):
        check_claims(case, 4096)


def test_blocks_are_scattered_and_come_back():
    pool = BlockPool(100, seed=0)
    taken = pool.take(60)
    assert len(set(taken)) == 60
    assert list(taken) != sorted(taken)
    assert BlockPool(100, seed=0).take(60) == taken
    pool.give_back(taken)
    assert pool.free == 100
    with pytest.raises(ValueError, match="twice"):
        pool.give_back(taken[:1])


def test_too_little_memory_is_said_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(blocks_module, "available_memory_bytes", lambda: 2 * 1024**3)
    with pytest.raises(UnavailableError, match="lower --tokens"):
        check_memory(options("--tokens", "8192").case, ("source", "target"))
    check_memory(options("--tokens", "2048").case, ("target",))
    assert cli.exit_code(UnavailableError("x")) == 3


@pytest.mark.parametrize(
    ("text", "host", "port"), [("h:1", "h", 1), ("[::1]:65535", "::1", 65535), ("127.0.0.1:0", "127.0.0.1", 0)]
)
def test_addresses(text, host, port):
    assert split_address(text) == (host, port)


@pytest.mark.parametrize("text", ["h", ":1", "h:", "h:x", "h:65536", "h:-1"])
def test_bad_addresses_are_refused(text):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split_address(text)


@pytest.mark.parametrize(
    "flags",
    [["--max-gbps", "0"], ["--max-gbps", "nan"], ["--max-gbps", "1e9"], ["--transport", "loopback", "--max-gbps", "1"]],
)
def test_a_cap_that_makes_no_sense_is_refused_by_its_flag(flags, capsys):
    assert cli.main(["bench", *flags]) == 2
    assert "--max-gbps" in capsys.readouterr().err


def test_who_cannot_be_compared_with_is_said_before_anything_starts(capsys, monkeypatch):
    assert cli.main(["bench", "--compare", "pigeon"]) == 2
    assert "'pigeon'" in capsys.readouterr().err
    monkeypatch.setattr(peers, "PEERS", {"nixl": "nixl", "absent_peer": "absent-peer"})
    assert cli.main(["bench", "--compare", "absent_peer"]) == 3
    assert "pip install absent-peer" in capsys.readouterr().err
