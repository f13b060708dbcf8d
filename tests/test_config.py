"""Configuration: who wins, where a value came from, and what is said of a wrong one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvlink import limits
from kvlink.config import Config
from kvlink.errors import ConfigError

SECRET = "a secret of some length"


def load(arguments=None, environ=None, file=None):
    return Config.load(arguments, environ or {}, file)


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "kvlink.toml"
        path.write_text(text)
        return path

    return write


def test_arguments_win_over_environment_over_file_over_defaults(toml):
    file = toml('[kvlink]\nmax_legs = 1\nchunk_leaves = 2\npark_seconds = 3\ntransports = ["ucx", "loopback"]')
    environ = {"KVLINK_MAX_LEGS": "10", "KVLINK_CHUNK_LEAVES": "20", "PATH": "/bin"}
    config = load({"max_legs": 100, "park_seconds": None}, environ, file)
    assert (config.max_legs, config.chunk_leaves, config.park_seconds) == (100, 20, 3.0)
    assert config.transports == ("ucx", "loopback")
    assert config.lease_seconds == limits.LEASE_SECONDS
    origins = config.origins()
    assert origins["max_legs"] == "argument"
    assert origins["chunk_leaves"] == "environment"
    assert origins["park_seconds"] == f"file {file}"
    assert origins["lease_seconds"] == "default"
    assert set(origins) == {field.name for field in dataclasses.fields(Config) if not field.name.startswith("_")}


def test_the_environment_may_name_the_file(toml):
    file = toml("[kvlink]\nmax_legs = 7")
    assert load(environ={"KVLINK_CONFIG": str(file)}).max_legs == 7


def test_environment_text_becomes_typed_values():
    environ = {"KVLINK_INTEGRITY": "Off", "KVLINK_TRANSPORTS": "loopback, ucx", "KVLINK_LEASE_SECONDS": "4"}
    config = load(environ=environ)
    assert (config.integrity, config.transports, config.lease_seconds) == (False, ("loopback", "ucx"), 4.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_legs", "many"), ("max_legs", 0), ("max_legs", True), ("lease_seconds", float("nan")), ("lease_seconds", -1),
     ("transports", ""), ("transports", "ucx,ucx"), ("integrity", "maybe"), ("integrity", 1), ("listen", "tcp://h"),
     ("chunk_leaves", limits.MAX_CHUNK_LEAVES + 1), ("ucx_origin", "newest"), ("advertise", "0.0.0.0"),
     ("listen", 5), ("secret", "short"), ("ucx_tls", "")],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_origin_and_what_is_accepted(name, value):
    with pytest.raises(ConfigError, match=rf"{name} cannot be .*from argument.*accepted: \w+"):
        load({name: value})


def test_unknown_settings_are_refused_in_arguments_and_file_and_warned_of_in_the_environment(toml, caplog):
    with pytest.raises(ConfigError, match=r"'max_leggs' \(from argument\); known are listen"):
        load({"max_leggs": 1})
    with pytest.raises(ConfigError, match="'max_leggs'"):
        load(file=toml("[kvlink]\nmax_leggs = 1"))
    load(environ={"KVLINK_MAX_LEGGS": "1"})
    assert "KVLINK_MAX_LEGGS" in caplog.text


@pytest.mark.parametrize("text", ["not = [toml", "max_legs = 1", "[kvlink]\nlisten = {}", "a = " + "[" * 100_000])
def test_a_broken_file_is_a_config_error(toml, text):
    with pytest.raises(ConfigError):
        load(file=toml(text))


def test_a_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="none"):
        load(file=tmp_path / "none.toml")


def test_three_heartbeats_fit_into_a_lease_and_into_silence():
    """Two lost heartbeats must not end a lease."""
    for other in ("lease_seconds", "peer_lost_seconds"):
        with pytest.raises(ConfigError, match=f"{other} is 1 .*heartbeat_seconds from default, {other} from argument"):
            load({other: 1.0})
    assert load({"lease_seconds": 0.3, "peer_lost_seconds": 0.3, "heartbeat_seconds": 0.1}).lease_seconds == 0.3


# --- secrets and open mode ------------------------------------------------------------------------------------------


def test_a_secret_comes_from_a_file_less_its_line_end(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(SECRET.encode() + b"\n")
    config = load(environ={"KVLINK_SECRET_FILE": str(path)})
    assert config.secret == SECRET.encode()
    assert config.open_mode is False
    assert config.origins()["secret"] == "environment"


def test_a_secret_is_never_shown(tmp_path):
    config = load({"secret": SECRET})
    assert SECRET not in repr(config)
    with pytest.raises(ConfigError) as caught:
        load({"secret": SECRET[:10]})
    assert SECRET[:10] not in str(caught.value)


def test_secret_files_that_cannot_be_trusted_or_read_are_refused(tmp_path):
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match="cannot be read"):
        load({"secret_file": path})
    path.write_text(SECRET)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="written by everybody"):
        load({"secret_file": path})
    with pytest.raises(ConfigError, match="both set"):
        load({"secret_file": path, "secret": SECRET})


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", "tcp://[::1]:0", "tcp://localhost:5000", "unix:///run/k.sock"])
def test_a_listener_on_loopback_may_be_open_by_default(listen):
    config = load({"listen": listen})
    assert config.open_mode is True
    assert "only this machine" in config.origins()["open_mode"]


@pytest.mark.parametrize(
    "arguments", [{"listen": "tcp://10.0.0.1:0"}, {"listen": "tcp://node7:0"}, {"open_mode": False}]
)
def test_open_mode_elsewhere_must_be_asked_for_by_name(arguments):
    """K2."""
    with pytest.raises(ConfigError, match="open_mode"):
        load(arguments)


def test_open_mode_by_name_wins_over_a_secret_from_further_down_only():
    environ = {"KVLINK_SECRET": SECRET}
    config = load({"open_mode": True, "listen": "tcp://10.0.0.1:0"}, environ)
    assert config.open_mode
    assert config.secret is None
    with pytest.raises(ConfigError, match="set one of the two"):
        load({"open_mode": True, "secret": SECRET})
    with pytest.raises(ConfigError, match="set one of the two"):
        load({"secret": SECRET}, {"KVLINK_OPEN_MODE": "1"})


# --- addresses ------------------------------------------------------------------------------------------------------


def test_addresses_are_kept_in_one_form():
    """J2."""
    assert load({"listen": "127.0.0.1:80"}).listen == "tcp://127.0.0.1:80"
    assert load({"listen": "tcp://[0:0::1]:80"}).listen == "tcp://[::1]:80"
    assert load({"advertise": "[FD00::1]"}).advertise == "fd00::1"


def test_a_wildcard_needs_an_address_that_peers_can_dial():
    arguments = {"listen": "tcp://[::]:0", "secret": SECRET}
    with pytest.raises(ConfigError, match="state advertise"):
        load(arguments)
    assert load(arguments | {"advertise": "node7"}).advertise == "node7"


def test_a_config_is_frozen_and_checked_however_it_is_made():
    config = Config(max_legs=3)
    assert config.origins()["max_legs"] == "argument"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_legs = 4
    with pytest.raises(ConfigError):
        Config(max_legs=0)
    with pytest.raises(ConfigError, match="max_legs"):
        dataclasses.replace(config, max_legs=-1)
    assert Config(secret=SECRET.encode()).open_mode is False


def test_every_setting_is_explained_to_the_operator() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "operations.md").read_text()
    missing = [field.name for field in dataclasses.fields(Config) if f"`{field.name}`" not in page]
    assert missing == ["_origins"]
