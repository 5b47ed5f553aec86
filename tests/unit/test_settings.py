"""Settings: three spellings of every key, their precedence, and refusals that name flag, value and limit."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.config import EngineConfig
from trireme.errors import ConfigError
from trireme.settings import SECRET, Setting, load, table, to_yaml


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


def test_addresses_exported_by_container_platforms_are_not_settings():
    environ = {
        "TRIREME_PORT": "tcp://10.0.0.1:8000",
        "TRIREME_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "TRIREME_SERVICE_HOST": "10.0.0.1",
    }
    assert load(environ=environ).config == EngineConfig()
    assert load(environ={"TRIREME_PORT": "81"}).config.serving.port == 81


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("paralel: {tp: 2}", ["paralel", "did you mean parallel"]),
        ("parallel: {tpp: 2}", ["parallel.tpp", "did you mean tp"]),
        ("max-lem: 2", ["max-lem", "did you mean max_len"]),
        ("parallel: {tp: none}", ["parallel.tp is 'none'", "1..64"]),
        ("- 1", ["must hold settings"]),
        ("a: [", ["is not YAML"]),
        ("tp: {a: 1}", ["no group tp"]),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path, text, words):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    message = refusal(file=file)
    for word in [str(file), *words]:
        assert word in message


def test_a_file_that_is_not_there(tmp_path):
    assert "No such file" in refusal(file=tmp_path / "none.yaml")


def test_an_empty_file_is_all_defaults(tmp_path):
    (tmp_path / "t.yaml").write_text("# nothing\n")
    assert load(environ={}, file=tmp_path / "t.yaml").config == EngineConfig()


def test_secrets_are_not_written_down():
    for name in SECRET:
        assert "hunter2" not in to_yaml(load({name: ("hunter2",)}, environ={}).config, defaults=True)


@pytest.mark.parametrize("name", SECRET)
def test_an_empty_key_is_refused_wherever_it_comes_from(name):
    for flags, environ in (({name: "a,"}, {}), ({name: ("",)}, {}), ({}, {"TRIREME_" + name.upper(): ""})):
        with pytest.raises(ConfigError, match="has an empty key"):
            load(flags, environ=environ)


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
            values = st.text(min_size=1, max_size=20).map(lambda t: t.strip() or "x")
    if setting.name == "kv_memory":
        values = st.sampled_from(["1", "512MiB", "1.5 GiB", "3gb"])
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
