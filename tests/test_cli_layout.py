"""``kvlink layout``: compatible or not, by which field; runs, bytes and path; who feeds whom."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from geometries import engine_specs, identity_of

from kvlink import cli, limits
from kvlink.cli.layout.compare import stretches
from kvlink.layout import DType, GroupShare
from kvlink.plan import CopyPlan, choose_path

SPECS = Path(__file__).resolve().parent.parent / "examples" / "specs"


def ask(capsys, source, target, *arguments):
    """Exit code and the JSON answer."""
    code = cli.main(["layout", str(SPECS / source), str(SPECS / target), "--json", "-", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_compatible_engines_are_planned_leg_by_leg_d1(capsys):
    """D1: TP 2 to TP 4, blocks of 16 to 32, NHD to HND."""
    code, answer = ask(capsys, "prefill-nhd-tp2.json", "decode-hnd-tp4.json", "--tokens", "1000")
    assert (code, answer["schema"], answer["compatible"], answer["difference"]) == (0, "kvlink.layout/1", True, None)
    assert answer["bytes"] == 1000 * 32 * 2 * 8 * 128 * 2
    assert answer["runs"] * answer["run_bytes"] == answer["bytes"]
    feeds = {(leg["source"], leg["target"]): leg["shares"][0]["heads"] for leg in answer["legs"]}
    assert feeds == {("0/0", "0/0"): "0-1", ("0/0", "0/1"): "2-3", ("0/1", "0/2"): "4-5", ("0/1", "0/3"): "6-7"}
    assert {leg["path"] for leg in answer["legs"]} == {"packed"}
    assert "predicted against" in answer["legs"][0]["path_reason"]


def test_the_path_follows_the_length_of_the_runs_i3(capsys):
    """I3: below the bound that was measured, runs are gathered."""
    _, answer = ask(capsys, "prefill-nhd-tp2.json", "prefill-nhd-tp2.json")
    assert {(leg["run_bytes"], leg["path"]) for leg in answer["legs"]} == {(16 * 4 * 128 * 2, "packed")}
    assert answer["tokens"] == 4096


def test_what_differs_is_named_with_both_values(capsys):
    code, answer = ask(capsys, "prefill-nhd-tp2.json", "decode-other-rope.json")
    assert (code, answer["compatible"], answer["legs"]) == (1, False, [])
    difference = answer["difference"]
    assert difference["field"] == "identity.rope.theta"
    assert (difference["source_value"], difference["target_value"]) == ("500000.0", "10000.0")
    assert difference["error"] == "mismatch"


def test_a_conversion_is_named_and_takes_the_packed_path(capsys):
    code, answer = ask(capsys, "prefill-nhd-tp2.json", "decode-nhd-fp8.json")
    assert (code, answer["conversions"]) == (0, ["groups.full: bfloat16 to float8_e4m3"])
    assert {leg["path"] for leg in answer["legs"]} == {"packed"}


def test_replicas_that_nobody_reads_are_told_d7(capsys):
    """D7: the latent of TP 2 is read from one rank, and one tensor of 576 feeds two of 512 and 64."""
    _, answer = ask(capsys, "prefill-mla-tp2.json", "decode-mla-apart.json", "--tokens", "100", "--first-token", "40")
    assert answer["source"]["unread"] == ["0/1"]
    assert answer["bytes"] == 60 * 2 * 576 * 2


def test_windows_and_states_of_a_hybrid_are_counted(capsys):
    _, answer = ask(capsys, "prefill-hybrid.json", "decode-hybrid.json", "--tokens", "2000")
    row = 2 * 2 * 64 * 2
    assert answer["bytes"] == 2000 * row + 1024 * row + 8 * 4096


@pytest.mark.parametrize("target", ["decode-hnd-tp4.json", "decode-other-rope.json", "decode-nhd-fp8.json"])
def test_people_get_a_table_and_a_picture(capsys, target):
    code = cli.main(["layout", str(SPECS / "prefill-nhd-tp2.json"), str(SPECS / target)])
    shown = capsys.readouterr().out
    assert ("compatible  yes" in shown, "source \\ target" in shown) == (code == 0, code == 0)
    assert ("identity.rope.theta" in shown) == (code == 1)


def test_many_target_ranks_are_listed_instead(capsys, tmp_path):
    wide = json.loads((SPECS / "decode-hnd-tp4.json").read_text())
    wide["standard"]["tp"] = 80
    (tmp_path / "wide.json").write_text(json.dumps(wide))
    assert cli.main(["layout", str(SPECS / "prefill-nhd-tp2.json"), str(tmp_path / "wide.json")]) == 0
    shown = capsys.readouterr().out
    assert "source 0/0 -> target 0/0: h0 l0-31" in shown
    assert "and 16 more legs" in shown


def rank_file(tmp_path, specs, name="ranks.json"):
    path = tmp_path / name
    path.write_bytes(msgspec.json.encode({"ranks": specs}))
    return path


def test_ranks_are_read_in_any_order_and_refused_if_they_are_not_one_engine(capsys, tmp_path):
    specs = engine_specs("nhd", identity=identity_of(), tp=2)
    path = rank_file(tmp_path, specs[::-1])
    assert cli.main(["layout", str(path), str(path)]) == 0
    other = msgspec.structs.replace(specs[1], identity=identity_of(weights_revision="b"))
    for broken, message in (
        (specs[:1], "give each of pp_size x tp_size once"),
        ([specs[0], other], "another identity"),
    ):
        path = rank_file(tmp_path, broken)
        assert cli.main(["layout", str(path), str(path)]) == 2
        assert message in capsys.readouterr().err


STANDARD = json.loads((SPECS / "prefill-nhd-tp2.json").read_text())["standard"]
HUGE = {**STANDARD["identity"], "num_layers": 10**9}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no engine file"),
        (b"{}", "either 'standard' or 'ranks'"),
        (b"[" * 5000, "is no engine file"),
        (b'{"standard": {"tp": 2}}', "missing required field"),
        (b'{"engine": 1}', "unknown field"),
        (json.dumps({"standard": {**STANDARD, "tp": 0}}).encode(), "tp"),
        (json.dumps({"standard": {**STANDARD, "pp": 64}}).encode(), "fewer than pp_size"),
        (json.dumps({"standard": {**STANDARD, "layout": "nope"}}).encode(), "layout is 'nope'"),
        (json.dumps({"standard": {**STANDARD, "num_blocks": -1}}).encode(), "region_bytes[0] is -"),
        (json.dumps({"standard": {**STANDARD, "pp": 1024, "tp": 1024}}).encode(), "tp times pp is 1048576"),
        (json.dumps({"standard": {**STANDARD, "identity": HUGE}}).encode(), "num_layers is 1000000000"),
        (b" " * (limits.MAX_FRAME_BYTES + 1), "has more than"),
    ],
)
def test_a_malformed_file_is_told_and_ends_with_2(capsys, tmp_path, content, message):
    (tmp_path / "bad.json").write_bytes(content)
    assert cli.main(["layout", str(SPECS / "prefill-nhd-tp2.json"), str(tmp_path / "bad.json")]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told) < 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens is 0"),
        (["--tokens", "40000"], "the 32768 tokens that both caches hold"),
        (["--tokens", "10", "--first-token", "11"], "--first-token 11"),
        (["--json", "/nowhere/at/all.json"], "cannot be written"),
    ],
)
def test_bad_arguments_end_with_2(capsys, arguments, message):
    file = str(SPECS / "prefill-nhd-tp2.json")
    assert cli.main(["layout", file, file, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there_ends_with_2(capsys):
    assert cli.main(["layout", "/nowhere/a.json", "/nowhere/b.json"]) == 2
    assert "/nowhere/a.json cannot be read" in capsys.readouterr().err


def test_json_goes_to_a_file_beside_the_table(capsys, tmp_path):
    file, out = str(SPECS / "prefill-nhd-tp2.json"), tmp_path / "answer.json"
    assert cli.main(["layout", file, file, "--json", str(out)]) == 0
    assert json.loads(out.read_bytes())["compatible"] is True
    assert "compatible  yes" in capsys.readouterr().out


def test_stretches_of_ids():
    share = GroupShare(name="full", layers=(0, 1, 2, 5, 7, 8), heads=(3,))
    assert (stretches(share.layers), stretches(share.heads), stretches(())) == ("0-2,5,7-8", "3", "")


def test_the_path_follows_the_length_of_runs_and_what_is_offered():
    nothing = CopyPlan((), 0)
    assert choose_path(nothing, ("direct",)) == ("direct", "nothing is moved")
    from test_plan_kinds import plan_of, rank_spec  # noqa: PLC0415 - one plan of each kind is enough here

    short = plan_of(rank_spec(), rank_spec("hnd"))
    assert choose_path(short, ("direct", "packed"))[0] == "packed"
    assert choose_path(short, ("direct",))[0] == "direct"
    converting = plan_of(rank_spec(), rank_spec(dtype=DType.FLOAT8_E4M3))
    assert choose_path(converting, ("direct", "packed"))[0] == "packed"
    assert choose_path(converting, ("direct",))[0] is None


def test_a_name_that_looks_like_markup_is_shown_as_it_is(capsys, tmp_path):
    engine = json.loads((SPECS / "prefill-nhd-tp2.json").read_text())
    engine["standard"]["identity"]["model"] = "[bold]llama[/nope]"
    file = tmp_path / "engine.json"
    file.write_text(json.dumps(engine))
    assert cli.main(["layout", str(file), str(file)]) == 0
    assert "[bold]llama[/nope]" in " ".join(capsys.readouterr().out.split())
