"""Settings: three spellings of every key, their precedence, and refusals that name flag, value and limit."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.config import EngineConfig
from trireme.errors import ConfigError
from trireme.settings import KEY_FILES, SECRET, Setting, load, table, to_yaml, without_keys


def refusal(**sources) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**{"environ": {}, **sources})
    return str(caught.value)


def test_defaults_are_those_of_the_structs():
    loaded = load(environ={})
    assert loaded.config == EngineConfig()
    assert loaded.sources == {}


def test_every_name_is_unique_so_that_flags_need_no_group():
    names = [s.name for s in table()]
    assert len(names) == len(set(names))


def test_every_setting_has_help_of_one_line():
    for setting in table():
        assert setting.help, setting.key
        assert "\n" not in setting.help
        assert not setting.help.endswith(".")


def test_flag_over_environment_over_file_over_default(tmp_path):
    file = tmp_path / "t.yaml"
    file.write_text("parallel: {tp: 2, pp: 2, dp: 2}\nport: 1\n")
    environ = {"TRIREME_TP": "3", "TRIREME_PP": "3", "TRIREME_CONFIG": str(file), "PATH": "/bin"}
    loaded = load({"tp": "4"}, environ=environ)
    parallel = loaded.config.parallel
    assert (parallel.tp, parallel.pp, parallel.dp, loaded.config.serving.port) == (4, 3, 2, 1)
    assert loaded.sources["parallel.tp"] == "--tp"
    assert loaded.sources["parallel.pp"] == "environment TRIREME_PP"
    assert loaded.sources["parallel.dp"] == f"{file}: parallel.dp"


def test_file_keys_grouped_or_flat_with_dash_or_underscore(tmp_path):
    file = tmp_path / "t.yaml"
    file.write_text("cache:\n  block-size: 4\nmax_num_seqs: 3\nmax-len: 9\nmodel: here\napi_key: [a, b]\n")
    config = load(environ={}, file=file).config
    assert config.cache.block_size == 4
    assert config.scheduler.max_num_seqs == 3
    assert config.model.max_len == 9
    assert config.model.model == "here"
    assert config.serving.api_key == ("a", "b")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tp": "0"}, ["--tp", "'0'", "1..64"]),
        ({"tp": "x"}, ["--tp", "'x'", "whole number"]),
        ({"tp": "1.5"}, ["--tp", "whole number"]),
        ({"tp": 2.0}, ["--tp", "2.0"]),
        ({"tp": True}, ["--tp", "True"]),
        ({"max_len": "99999999999999999999"}, ["--max-len"]),
        ({"queue_timeout": "nan"}, ["--queue-timeout", "nan"]),
        ({"queue_timeout": "inf"}, ["--queue-timeout"]),
        ({"step_timeout": "0"}, ["--step-timeout", "above 0"]),
        ({"kv_dtype": "int3"}, ["--kv-dtype", "'int3'", "bfloat16"]),
        ({"prefix_cache": "maybe"}, ["--prefix-cache", "true or false"]),
        ({"kv_memory": "4 apples"}, ["--kv-memory", "'4 apples'", "GiB"]),
        ({"kv_memory": "0"}, ["--kv-memory", "above 0"]),
        ({"host": ["a"]}, ["--host"]),
        ({"port": None}, ["--port", "None"]),
        ({"max_lenn": "4"}, ["max_lenn", "did you mean max_len"]),
    ],
)
def test_a_refusal_names_flag_value_and_limit(flags, words):
    text = refusal(flags=flags)
    for word in words:
        assert word in text


def test_unknown_environment_name_gets_the_nearest():
    assert "did you mean TRIREME_MAX_LEN" in refusal(environ={"TRIREME_MAXLEN": "4"})


def test_a_bad_value_from_the_environment_is_named_as_such():
    assert "environment TRIREME_TP is 'no'" in refusal(environ={"TRIREME_TP": "no"})


@pytest.mark.parametrize("service", ["TRIREME", "TRIREME_API", "TRIREME_TP", "TRIREME_8B_CANARY"])
@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::17"])
def test_addresses_of_kubernetes_services_are_not_settings(service, address):
    """What a kubelet sets for a service with a named and an unnamed port, of each protocol."""
    environ = {
        f"{service}_SERVICE_HOST": address,
        f"{service}_SERVICE_PORT": "8000",
        f"{service}_SERVICE_PORT_HTTP_MAIN": "8000",
        f"{service}_PORT": f"tcp://{address}:8000",
    }
    for protocol in ("tcp", "udp", "sctp"):
        each = f"{service}_PORT_8000_{protocol.upper()}"
        environ |= {
            each: f"{protocol}://{address}:8000",
            f"{each}_PROTO": protocol,
            f"{each}_PORT": "8000",
            f"{each}_ADDR": address,
        }
    assert load(environ=environ).config == EngineConfig()
    assert load(environ={**environ, "TRIREME_MAX_LEN": "81"}).config.model.max_len == 81


def test_a_port_is_still_a_setting():
    assert load(environ={"TRIREME_PORT": "81"}).config.serving.port == 81
    assert "environment TRIREME_PORT is 'http://10.0.0.1:80'" in refusal(environ={"TRIREME_PORT": "http://10.0.0.1:80"})


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [
        ("TRIREME_PORTS", "8000", "TRIREME_PORT"),
        ("TRIREME_PORT_", "tcp://10.0.0.1:8000", "TRIREME_PORT"),
        ("TRIREME_SERVICE_NAME", "10.0.0.1", "TRIREME_SERVED_NAME"),
        ("TRIREME_HOST_ADDR", "10.0.0.1", "TRIREME_HOST"),
        ("TRIREME_API_SERVER", "4", "TRIREME_API_SERVERS"),
        ("TRIREME_API_KEYS", "k", "TRIREME_API_KEY"),
        ("TRIREME_BODY_LIMIT_PORT", "4096", "TRIREME_BODY_LIMIT"),
    ],
)
def test_what_only_resembles_a_service_is_refused_with_the_nearest(name, value, nearest):
    assert f"did you mean {nearest}?" in refusal(environ={name: value})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("paralel: {tp: 2}", ["paralel", "did you mean parallel"]),
        ("parallel: {tpp: 2}", ["parallel.tpp", "did you mean tp"]),
        ("max-lem: 2", ["max-lem", "did you mean max_len"]),
        ("parallel: {tp: none}", ["parallel.tp is 'none'", "1..64"]),
        ("- 1", ["must hold settings"]),
        ("a: [", ["is not YAML"]),
        ("tp: {a: 1}", ["no group tp", "a setting of parallel"]),
        ("cache: 5", ["cache is a group of settings, not a value"]),
        ("cache: [5]", ["cache is a group of settings, not a value"]),
        ("cahce: 5", ["no setting cahce", "did you mean cache"]),
        ("cache: {port: 5}", ["cache.port", "it belongs to serving"]),
        ("port: 1\ntp: 2\nport: 3", ["has port twice, in lines 1 and 3"]),
        ("cache:\n  block_size: 4\ncache:\n  block_size: 8", ["has cache twice, in lines 1 and 3"]),
        ("cache: {block_size: 4, block_size: 4}", ["has cache.block_size twice"]),
        ("port: 1\nserving: {port: 1}", ["has serving.port twice, as port and as serving.port"]),
        ("max-len: 1\nmax_len: 1", ["has model.max_len twice, as max-len and as max_len"]),
        ("port:", ["port is None"]),
        ("port: [1]", ["port is ['1']"]),
        ("port: 12:30", ["port is '12:30'", "whole number"]),
        ("engine_labels: [a, ~]", ["engine_labels is ['a', None]"]),
        ("model: !python/name:os.system", ["a tag that is not supported, in line 1"]),
        ("? [a]\n: 1", ["a name that is no text"]),
        ("tp: " + "[" * 5000, ["nested too deeply"]),
        ("a: &a [*a]", ["nested more than"]),
        (
            "a: &a ["
            + "x," * 99
            + "]\n"
            + "\n".join(f"{b}: &{b} [{(f'*{a},') * 99}]" for a, b in zip("abc", "bcd", strict=True)),
            ["has more than"],
        ),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path, text, words):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    message = refusal(file=file)
    for word in [str(file), *words]:
        assert word in message


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("served_name: off", "served_name", "off"),
        ("served_name: 1.10", "served_name", "1.10"),
        ("served_name: 017", "served_name", "017"),
        ("served_name: 12:30", "served_name", "12:30"),
        ("served_name: 2024-01-01", "served_name", "2024-01-01"),
        ("served_name: 0x1F", "served_name", "0x1F"),
        ("served_name: 1_000", "served_name", "1_000"),
        ("served_name: 1e3", "served_name", "1e3"),
        ('served_name: "null"', "served_name", "null"),
        ("served_name: null", "served_name", None),
        ("served_name: ~", "served_name", None),
        ("served_name: !!str true", "served_name", "true"),
        ("policy: no", "policy", "no"),
        ("pin_cores: on", "pin_cores", "on"),
        ("api_key: [0012, 1.10, off, 12:30]", "api_key", ("0012", "1.10", "off", "12:30")),
        ("api_key: 0012", "api_key", ("0012",)),
        ("engine_weights: [2, 1.50]", "engine_weights", ("2", "1.50")),
        ("port: 017", "port", 17),
        ("aging: 1e3", "aging", 1000.0),
        ("prefix_cache: off", "prefix_cache", False),
        ('prefix_cache: "No"', "prefix_cache", False),
        ("check: 1", "check", True),
        ("cache:\nport: 3", "port", 3),
    ],
)
def test_a_scalar_is_what_stands_in_the_file_read_by_the_kind_of_the_setting(tmp_path, text, name, value):
    file = tmp_path / "t.yaml"
    file.write_text(text)
    config = load(environ={}, file=file).config
    (setting,) = [s for s in table() if s.name == name]
    assert getattr(getattr(config, setting.group), name) == value


def test_a_file_may_come_through_a_pipe_and_not_without_end(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b"port: 3")
    os.close(writing)
    assert load(environ={}, file=f"/dev/fd/{reading}").config.serving.port == 3
    os.close(reading)
    assert "the limit for a file of settings" in refusal(file="/dev/zero")
    assert "Is a directory" in refusal(file=tmp_path)


def test_a_file_that_is_not_there(tmp_path):
    assert "No such file" in refusal(file=tmp_path / "none.yaml")


def test_an_empty_file_is_all_defaults(tmp_path):
    (tmp_path / "t.yaml").write_text("# nothing\n")
    assert load(environ={}, file=tmp_path / "t.yaml").config == EngineConfig()


# ---------------------------------------------------------------- keys


def test_keys_are_not_written_down():
    for name in SECRET:
        config = load({name: ("hunter2",)}, environ={}).config
        assert "hunter2" not in to_yaml(config, defaults=True)
        assert "hunter2" not in repr(config)
        assert "hunter2" not in str(msgspec.to_builtins(without_keys(config)))


@pytest.mark.parametrize("name", SECRET)
def test_an_empty_key_is_refused_wherever_it_comes_from(name):
    for flags, environ in (({name: "a,"}, {}), ({name: ("",)}, {}), ({}, {"TRIREME_" + name.upper(): ""})):
        with pytest.raises(ConfigError, match="has an empty key"):
            load(flags, environ=environ)


FAULTY_KEYS = [
    "hunter2 ",
    "a,\thunter2",
    "hunter2\n",
    "hunter2\x1b[2J",
    "hunter2\0",
    "hunter2\udcff",
    "hunter2" * 200,
    ("hunter2", None),
    ("hunter2", ("hunter2",)),
    {"hunter2": "hunter2"},
]


@pytest.mark.parametrize("name", SECRET)
@pytest.mark.parametrize("faulty", FAULTY_KEYS, ids=repr)
def test_the_refusal_of_a_key_does_not_tell_it(name, faulty):
    with pytest.raises(ConfigError) as caught:
        load({name: faulty}, environ={})
    assert "--" + name.replace("_", "-") in str(caught.value)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("name", SECRET)
@pytest.mark.parametrize(
    "text",
    ['NAME: [a, "hunter2', "NAME: *hunter2", "NAME: &hunter2 [*hunter2]", "NAME: !hunter2", "NAME: [hunter2, ~]",
     "NAME: hunter2: x", "serving: {NAME: {a: hunter2}}", "NAME: 'hunter2 '", "NAME: hunter2\nNAME: hunter2",
     "NAME: hunter2\n\tport: 3", "NAME: @hunter2", "NAME: %hunter2", "NAME: hunter2\nNAME_file: hunter2"],
)  # fmt: skip
def test_the_refusal_of_a_file_with_a_key_does_not_tell_it(tmp_path, name, text):
    file = tmp_path / "t.yaml"
    file.write_text(text.replace("NAME", name))
    with pytest.raises(ConfigError) as caught:
        load(environ={}, file=file)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("name", SECRET)
def test_keys_of_a_file_are_added_to_the_others(tmp_path, name):
    file = tmp_path / "keys"
    file.write_bytes(b"one\r\n\n  two  \nthr,ee")
    for flags, environ in (({f"{name}_file": str(file)}, {}), ({}, {f"TRIREME_{name.upper()}_FILE": str(file)})):
        config = load({name: "zero,one", **flags}, environ=environ).config
        assert getattr(config.serving, name) == ("zero", "one", "two", "thr,ee")
        again = tmp_path / "again.yaml"
        again.write_text(to_yaml(config))
        assert getattr(load(environ={}, file=again).config.serving, name) == ("one", "two", "thr,ee")


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\n \n", "holds no key"), (b"hunter2\xff", "byte 7 is not UTF-8"), (b"hunter2\x1b", "control character"),
     (b"x\n" * 600_000, "more than"), (None, "No such file")],
)  # fmt: skip
def test_a_file_without_usable_keys_is_refused_and_does_not_open_the_door(tmp_path, content, words):
    file = tmp_path / "keys"
    if content is None:
        file = Path("hunter2")  # the key itself in place of a file's name is a likely mistake
    else:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load({"api_key_file": str(file)}, environ={})
    assert words in str(caught.value)
    assert str(caught.value).startswith("--api-key-file")
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def values_of(setting: Setting):
    """A strategy for legal values of one setting, None included where it is optional."""
    match setting.kind:
        case "switch":
            values = st.booleans()
        case "choice":
            values = st.sampled_from(setting.choices)
        case "whole":
            values = st.integers(int(setting.low or 0), int(setting.high or 2**62))
        case "real":
            values = st.floats((setting.low or 0) + 0.5, setting.high or 1e9)
        case "list":
            values = st.just(())
        case _:
            values = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20).map(
                lambda t: t.strip() or "x"
            )
    if setting.name == "kv_memory":
        values = st.sampled_from(["1", "512MiB", "1.5 GiB", "3gb"])
    if setting.name in KEY_FILES:
        return st.none()  # a file would have to be there
    return values if not setting.optional else st.one_of(st.none(), values)


@settings(max_examples=30, deadline=None)
@given(st.fixed_dictionaries({s.name: values_of(s) for s in table()}))
def test_any_configuration_written_down_gives_itself_again(tmp_path_factory, values):
    config = load(values, environ={}).config
    file = tmp_path_factory.mktemp("yaml") / "t.yaml"
    for defaults in (False, True):
        file.write_text(to_yaml(config, defaults=defaults))
        assert load(environ={}, file=file).config == config
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
