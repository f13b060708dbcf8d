#!/usr/bin/env python3
"""KVLink, NIXL and Mooncake Transfer Engine on the same bytes, in one run, taking turns.

    benchmarks/peers/compare.py --json - --peers-python VENV/bin/python

Each library has two processes of its own with a pool each, past the last-level cache and on huge pages. In every turn
one mode moves the same fragments, at random places on both sides, from one pool to the other; then every byte is
compared and set back to a canary. Modes take turns, in an order that rotates; processes of a peer are stopped
(SIGSTOP) while others have theirs, since some of them poll. What cannot be run is named with its reason.

The table shows medians over rounds; a ratio is the median of the ratios of each round, against the peers' mode that is
best at that size. Payload is 1 GB = 1e9 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvlink.cli.output import check_writable
from kvlink.errors import ConfigError

HERE = Path(__file__).resolve().parent
SCHEMA = "kvlink.peers/1"
PLANES = 16
SLOT_BYTES = 2048
"""Of one token in one plane of KVLink's cache."""
SCENES = {"tcp": "TCP over loopback", "host": "two processes of one host, whatever is fastest"}
START_SECONDS = 120.0


@dataclass(frozen=True)
class Team:
    """Two processes of one library with one set of settings."""

    name: str
    program: str
    peer: bool
    settings: dict[str, object] = field(default_factory=dict)


def teams(scene: str, transports: list[str], contenders: list[str]) -> list[Team]:
    """Who takes part, of those asked for. The raw limits are no peer: they know of no request.

    KVLink has two: over a cache that the engine allocated, and over one that KVLink allocated.
    """
    wire = [name for name in transports if scene == "host" or name in {"ucx", "stream"}]
    entered = [
        Team("kvlink", "with_kvlink.py", peer=False, settings={"memory": "engine", "transports": wire}),
        Team("nixl, progress thread", "with_nixl.py", peer=True, settings={"progress_thread": True}),
        Team("nixl", "with_nixl.py", peer=True, settings={"progress_thread": False}),
        Team("mooncake", "with_mooncake.py", peer=True),
        Team("limit", "with_limits.py", peer=False),
    ]
    if "shared" in wire:
        own = Team(
            "kvlink's own cache", "with_kvlink.py", peer=False, settings={"memory": "kvlink", "transports": ["shared"]}
        )
        entered.insert(1, own)
    return [team for team in entered if any(team.name.startswith(name) for name in contenders)]


class Side:
    """One process. Stopped whenever it has nothing to do, if its library polls."""

    def __init__(self, python: str, team: Team, side: str, scene: str) -> None:
        environment = dict(os.environ)
        others = "" if team.peer else os.environ.get("PYTHONPATH", "")  # a peer's environment is its own
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), others]))
        if scene == "tcp" and team.peer:
            environment["UCX_TLS"] = "tcp"
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        self.process = subprocess.Popen(
            [python, str(HERE / team.program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._said, text=True, env=environment,
        )  # fmt: skip
        self.name = f"{team.name} {side}"

    def ask(self, do: str, **arguments: object) -> dict:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self.process.wait()
            raise PeerError(f"{self.name} ended with status {status}: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = [line.strip() for line in self._said if line.strip()]
        return lines[-1] if lines else "it said nothing"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class PeerError(Exception):
    """A library could not do it; its own words."""


class Pair:
    """The two sides of a team."""

    def __init__(self, python: str, team: Team, scene: str, stack: ExitStack) -> None:
        self.team = team
        self.sides = {}
        for side in ("source", "target"):
            self.sides[side] = Side(python, team, side, scene)
            stack.callback(self.sides[side].close)
        self.modes: dict[str, str] = {}

    def open(self, scene: str, fragment_bytes: int, blocks: int) -> dict[str, str]:
        """Start both; the modes that are not there, with the reason."""
        absent, cards, modes = {}, {}, []
        for side, process in self.sides.items():
            answer = process.ask(
                "open", side=side, scene=scene, fragment_bytes=fragment_bytes, planes=PLANES, blocks=blocks,
                settings=self.team.settings,
            )  # fmt: skip
            cards[side] = answer["card"]
            absent |= answer["absent"]
            modes.append(answer["modes"])
        self.sides["source"].ask("meet", card=cards["target"])
        self.sides["target"].ask("meet", card=cards["source"])
        self.modes = {mode: words for mode, words in modes[0].items() if mode in modes[1]}
        self.rest()
        return absent

    def rest(self) -> None:
        """KVLink's engines sleep by themselves, and tell a stopped peer from a live one."""
        if self.team.peer:
            for side in self.sides.values():
                side.signal(signal.SIGSTOP)

    def wake(self) -> None:
        for side in self.sides.values():
            side.signal(signal.SIGCONT)

    def turn(self, mode: str, number: int, theirs: list[int], ours: list[int]) -> dict[str, float]:
        """One move, checked. Raises if a byte is wrong."""
        self.wake()
        source, target = self.sides["source"], self.sides["target"]
        mover, other = (source, target) if mode == "write" else (target, source)
        near, far = (theirs, ours) if mover is source else (ours, theirs)
        for side in (source, target):
            side.ask("begin")
        offer = other.ask("offer", mode=mode, turn=number, blocks=far)["offer"]
        seconds = mover.ask("move", mode=mode, theirs=far, ours=near, offer=offer)["seconds"]
        other.ask("finish", mode=mode, turn=number)
        cpu = {name: side.ask("end")["cpu_seconds"] for name, side in self.sides.items()}
        # Plain sockets place nothing: the pool must be as it was, which the sweep finds.
        wrong = 0 if mode == "socket" else target.ask("check", theirs=theirs, ours=ours)["wrong"]
        self.rest()
        if wrong:
            raise SystemExit(f"{self.team.name} {mode}: {wrong} fragments are wrong")
        return {"seconds": seconds, "source_cpu_seconds": cpu["source"], "target_cpu_seconds": cpu["target"]}

    def sweep(self) -> None:
        self.wake()
        touched = self.sides["target"].ask("sweep")["touched"]
        if touched:
            raise SystemExit(f"{self.team.name}: bytes changed that nobody was to write, in {touched} planes")


def run_size(options: argparse.Namespace, scene: str, fragment_bytes: int) -> dict[str, object]:
    """All modes at one fragment size."""
    blocks = (options.pool_mib << 20) // (PLANES * fragment_bytes)
    moved = (options.move_mib << 20) // (PLANES * fragment_bytes)
    payload = moved * PLANES * fragment_bytes
    absent: dict[str, str] = {}
    results: dict[str, dict[str, object]] = {}
    turns: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        entries = []
        for team in teams(scene, options.transports, options.contenders):
            python = options.peers_python if team.peer else sys.executable
            pair = Pair(python, team, scene, stack)
            try:
                absent |= {f"{team.name} {mode}": why for mode, why in pair.open(scene, fragment_bytes, blocks).items()}
            except PeerError as error:
                absent[team.name] = str(error)
                continue
            entries += [(f"{team.name} {mode}", pair, mode) for mode in pair.modes]
        chance = random.Random(options.seed)
        order = list(entries)
        for number in range(options.rounds + 1):
            progress(f"{scene}, fragments of {fragment_bytes >> 10} KiB: round {number} of {options.rounds}")
            theirs, ours = (chance.sample(range(blocks), moved) for _ in range(2))
            for name, pair, mode in order:
                try:
                    turn = pair.turn(mode, number, theirs, ours)
                except PeerError as error:
                    absent[name] = str(error)
                    entries = [entry for entry in entries if entry[1] is not pair]
                    continue
                if number > 0:  # the first is cold
                    turns.setdefault(name, []).append(turn)
            order = [entry for entry in order[1:] + order[:1] if entry in entries]
        progress("")
        for pair in {id(entry[1]): entry[1] for entry in entries}.values():
            pair.sweep()
        for name, pair, mode in entries:
            results[name] = summary(turns[name], payload) | {"peer": pair.team.peer, "words": pair.modes[mode]}
    return {
        "scene": scene, "fragment_bytes": fragment_bytes, "payload_bytes": payload, "results": results,
        "ratios": ratios(results) | {"over_limit": over_limit(results)}, "absent": absent,
    }  # fmt: skip


def progress(words: str) -> None:
    """One line that moves, where somebody watches."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{words:60}" if words else f"\r{'':60}\r")
        sys.stderr.flush()


def summary(turns: list[dict[str, float]], payload: int) -> dict[str, object]:
    """Medians of one mode, and every round's rate, in order."""
    rates = [payload / turn["seconds"] / 1e9 for turn in turns]
    cpu = {
        side: round(statistics.median(turn[f"{side}_cpu_seconds"] for turn in turns) / payload * 1e9, 3)
        for side in ("source", "target")
    }
    return {
        "gb_s": {
            "median": round(statistics.median(rates), 3),
            "min": round(min(rates), 3),
            "max": round(max(rates), 3),
        },
        "rounds_gb_s": [round(rate, 4) for rate in rates],
        "cpu_seconds_per_gb": cpu,
    }


def ratios(results: dict[str, dict]) -> dict[str, object]:
    """Each of KVLink's modes against the best of the peers' here, round by round."""
    peers = {name: result for name, result in results.items() if result["peer"]}
    if not peers:
        return {"best_peer": None, "over_best_peer": {}}
    best = max(peers, key=lambda name: peers[name]["gb_s"]["median"])
    over = {
        name: round(statistics.median(
            ours / theirs for ours, theirs in zip(result["rounds_gb_s"], peers[best]["rounds_gb_s"], strict=True)
        ), 2)
        for name, result in results.items()
        if name.startswith("kvlink")
    }  # fmt: skip
    return {"best_peer": best, "over_best_peer": over}


def over_limit(results: dict[str, dict]) -> dict[str, float]:
    """Each of KVLink's modes against the raw limit of this scene, round by round; empty if none was measured."""
    limit = next((result for name, result in results.items() if name.startswith("limit")), None)
    if limit is None:
        return {}
    return {
        name: round(statistics.median(
            ours / raw for ours, raw in zip(result["rounds_gb_s"], limit["rounds_gb_s"], strict=True)
        ), 2)
        for name, result in results.items()
        if name.startswith("kvlink")
    }  # fmt: skip


AIMS = {
    ("tcp", "kvlink stream-off", "over_best_peer"): {4: 8.0, 16: 2.5, 64: 1.4, 256: 1.4, 1024: 1.4},
    ("tcp", "kvlink stream-on", "over_best_peer"): {4: 6.0, 16: 1.8, 64: 1.0, 256: 1.0, 1024: 1.0},
    ("tcp", "kvlink stream-off", "over_limit"): {256: 0.9, 1024: 0.9},
    ("host", "kvlink shared-off", "over_best_peer"): {4: 5.0, 16: 1.8, 64: 1.3, 256: 1.05, 1024: 1.05},
    ("host", "kvlink shared-on", "over_best_peer"): {4: 3.5, 16: 1.6, 64: 1.0, 256: 1.0, 1024: 1.0},
    ("host", "kvlink's own cache shared-off", "over_limit"): {64: 1.5, 256: 1.5, 1024: 1.5},
    ("host", "kvlink's own cache shared-on", "over_limit"): {64: 1.0, 256: 1.0, 1024: 1.0},
}
"""What a mode aims at, by fragment size in KiB. Within a host the limit is UCX's get over CMA."""


def check(record: dict, out) -> bool:  # noqa: ANN001
    """Print each aim with what was reached; false if one was missed, or not measured."""
    reached = True
    for (scene, name, kind), aims in AIMS.items():
        for kib, aim in aims.items():
            found = [s for s in record["sizes"] if s["scene"] == scene and s["fragment_bytes"] == kib << 10]
            value = found[-1]["ratios"].get(kind, {}).get(name) if found else None
            word = "not measured" if value is None else f"{value:.2f} {'pass' if value >= aim else 'MISS'}"
            reached &= value is not None and value >= aim
            print(f"  {scene:5} {kib:5} KiB  {name:32} {kind:15} at least {aim:g}: {word}", file=out)
    return reached


def merged(path: Path, record: dict) -> dict:
    """What is in ``path`` already, with this run's sizes in the place of its own; each says how it was taken."""
    how = {key: record[key] for key in ("environment", "rounds", "move_mib", "pool_mib")}
    fresh = [size | {"taken": how} for size in record["sizes"]]
    measured = {(size["scene"], size["fragment_bytes"]) for size in fresh}
    before = json.loads(path.read_text())["sizes"] if path.exists() else []
    kept = [size for size in before if (size["scene"], size["fragment_bytes"]) not in measured]
    order = list(SCENES)
    sizes = sorted(kept + fresh, key=lambda size: (order.index(size["scene"]), size["fragment_bytes"]))
    return record | {"sizes": sizes}


def show(size: dict, out) -> None:  # noqa: ANN001
    """One size for people."""
    best, over = size["ratios"]["best_peer"], size["ratios"]["over_best_peer"]
    print(f"\n{SCENES[size['scene']]}, fragments of {size['fragment_bytes'] >> 10} KiB", file=out)
    for name, result in sorted(size["results"].items(), key=lambda item: -item[1]["gb_s"]["median"]):
        rate, cpu = result["gb_s"], result["cpu_seconds_per_gb"]
        note = f"{over[name]:.2f} x best peer" if name in over else "best peer" if name == best else ""
        if name in size["ratios"]["over_limit"]:
            note += f"  {size['ratios']['over_limit'][name]:.2f} of the limit"
        print(
            f"  {name:32} {rate['median']:7.2f} GB/s ({rate['min']:.2f} to {rate['max']:.2f})"
            f"  CPU s/GB {cpu['source']:.2f} + {cpu['target']:.2f}  {note}", file=out,
        )  # fmt: skip
    for name, why in size["absent"].items():
        print(f"  {name}: not measured: {why}", file=out)


def environment(options: argparse.Namespace) -> dict[str, object]:
    found = subprocess.run(
        [options.peers_python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    packages = json.loads(found.stdout) if found.returncode == 0 else []
    model = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpus": os.cpu_count(),
        "cpu": model[0] if model else "",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "peers": {
            package["name"]: package["version"]
            for package in packages
            if "nixl" in package["name"] or "mooncake" in package["name"]
        },
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "date": time.strftime("%Y-%m-%d"),
    }


def sizes(text: str) -> list[int]:
    """Fragments, by commas; each whole slots of KVLink's cache."""
    units = {"K": 1 << 10, "M": 1 << 20}
    found = []
    for part in text.split(","):
        number, unit = part[:-1], units.get(part[-1:].upper(), 0)
        if not number.isdecimal() or (size := int(number) * unit) < SLOT_BYTES or size % SLOT_BYTES:
            raise argparse.ArgumentTypeError(f"{part!r} is no multiple of {SLOT_BYTES >> 10}K; give sizes as 64K,1M")
        found.append(size)
    return found


def scenes(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SCENES:
            raise argparse.ArgumentTypeError(f"{name!r} is no scene; known are {', '.join(SCENES)}")
    return names


def count(text: str) -> int:
    if not text.isdecimal() or (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return number


def at_odds(options: argparse.Namespace) -> str | None:
    """What of the arguments, each fine by itself, cannot be done; ``None``: nothing."""
    largest = max(options.fragments)
    if not PLANES * largest <= options.move_mib << 20 <= options.pool_mib << 20:
        return (
            f"--move-mib {options.move_mib} of --pool-mib {options.pool_mib}: a turn moves {PLANES} fragments of "
            f"{largest >> 10} KiB or more, and no more than the pool has"
        )
    for name in options.contenders:
        if not name or not any(teams(scene, options.transports, [name]) for scene in options.scenes):
            return f"--contenders: {name!r} begins no contender's name; give kvlink, nixl, mooncake or limit"
    if shutil.which(options.peers_python) is None:
        return f"--peers-python {options.peers_python} cannot be run; give a Python"
    if options.json not in {None, "-"}:
        try:
            check_writable("--json", Path(options.json))
        except ConfigError as error:
            return str(error)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write all figures as JSON; - is standard output")
    parser.add_argument("--peers-python", default=sys.executable, metavar="FILE", help="of the peers' environment")
    parser.add_argument("--scenes", type=scenes, default=",".join(SCENES), help="of tcp and host (%(default)s)")
    parser.add_argument(
        "--fragments", type=sizes, default=sizes("4K,16K,64K,256K,1M"), help="sizes (4K,16K,64K,256K,1M)"
    )
    parser.add_argument(
        "--transports", type=lambda text: text.split(","), default=["ucx", "stream", "shared"], help="KVLink's"
    )
    parser.add_argument(
        "--contenders", type=lambda text: text.split(","), default=["kvlink", "nixl", "mooncake", "limit"],
        help="by the beginnings of their names (kvlink,nixl,mooncake,limit)",
    )  # fmt: skip
    parser.add_argument("--merge", action="store_true", help="keep what other sizes and scenes FILE holds")
    parser.add_argument(
        "--check", action="store_true", help="hold the ratios against the aims; exit 1 if one is missed"
    )
    parser.add_argument("--rounds", type=count, default=9, help="measured turns of each mode (%(default)s)")
    parser.add_argument("--pool-mib", type=count, default=512, help="of each process (%(default)s)")
    parser.add_argument("--move-mib", type=count, default=128, help="in each turn (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if trouble := at_odds(options):
        parser.error(trouble)
    record = {"schema": SCHEMA, "environment": environment(options), "rounds": options.rounds}
    record |= {"pool_mib": options.pool_mib, "move_mib": options.move_mib, "sizes": []}
    out = sys.stderr if options.json == "-" else sys.stdout
    for scene in options.scenes:
        for fragment_bytes in options.fragments:
            size = run_size(options, scene, fragment_bytes)
            record["sizes"].append(size)
            show(size, out)
    record["environment"]["load_after"] = [round(load, 2) for load in os.getloadavg()]
    if options.merge and options.json not in {None, "-"}:
        record = merged(Path(options.json), record)
    text = json.dumps(record, indent=1) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    elif options.json:
        Path(options.json).write_text(text)
    return 1 if options.check and not check(record, out) else 0


if __name__ == "__main__":
    sys.exit(main())
