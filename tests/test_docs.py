"""Pages lead somewhere, and their command lines are the command's: links, the index of docs, what `kvlink` takes."""

from __future__ import annotations

import re
import runpy
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

import kvlink
from kvlink.cli import EXIT_DONE, command_line, main
from kvlink.link.driver import Stats
from kvlink.link.room import RoomStats
from kvlink.memory.ledger import MemoryStats
from kvlink.observe.counters import Counters

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
GUIDES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("examples/*/*.md")]
COMMAND = re.compile(
    r"(?:^|`|&& |\$ )(kvlink (?:bench|layout|doctor|advise|simulate|report|preflight)\b[^`\n#&]*)", re.MULTILINE
)
SHOWN = re.compile(r"^```\n\$ (kvlink [^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_to_a_file(page: Path) -> None:
    dead = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not dead


def test_the_index_names_every_page() -> None:
    listed = set(LINK.findall((ROOT / "docs" / "README.md").read_text()))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_command_takes_every_command_line_that_a_page_writes(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in COMMAND.findall(page.read_text()):
        words = shlex.split(line)[1:]
        if len(words) > 1 and not {"...", "SOURCE.json"} & set(words):
            try:
                command_line().parse_args(words)
            except SystemExit:
                pytest.fail(f"{line}: {capsys.readouterr().err}")


def test_every_error_and_figure_that_operations_names_is_there() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    named = set(re.findall(r"`(\w+Error)`", page))
    assert named
    assert named <= vars(kvlink.errors).keys()
    known = {field.name for kind in (Counters, MemoryStats, RoomStats, Stats) for field in fields(kind)}
    watched = page.split("## What to watch")[1].split("## Events")[0]
    signs = re.findall(
        r"`([a-z_]+)(?:\.([a-z_]+))?", "".join(row.split("|")[1] for row in watched.splitlines() if row[:1] == "|")
    )
    assert len(signs) > 10
    assert {word for sign in signs for word in sign if word} <= known
    later = set(re.findall(r"`(?:memory|room)\.([a-z_]+)`", page))
    assert later <= known


def test_every_picture_is_drawn_by_a_command_and_shown() -> None:
    drawn = runpy.run_path(str(ROOT / "benchmarks" / "pictures"))["PICTURES"]
    for flags in drawn.values():
        command_line().parse_args(["bench", *shlex.split(flags), "--plot", "x.png"])
    shown = re.findall(r"\(pictures/([a-z-]+)\.png\)", (ROOT / "docs" / "performance.md").read_text())
    assert sorted(shown) == sorted(drawn) == sorted(file.stem for file in (ROOT / "docs" / "pictures").glob("*.png"))


def test_the_command_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == EXIT_DONE
    assert capsys.readouterr().out == f"kvlink {kvlink.__version__}\n"


@pytest.mark.parametrize(
    ("line", "shown"),
    [found for page in PAGES for found in SHOWN.findall(page.read_text())],
    ids=lambda text: text[:40],
)
def test_a_shown_output_is_the_output(
    line: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "120")
    assert main(shlex.split(line)[1:]) == EXIT_DONE
    printed = [text.rstrip() for text in capsys.readouterr().out.splitlines()]
    assert printed == [text.rstrip() for text in shown.splitlines()]
