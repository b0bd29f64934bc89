"""Configurations are read strictly, and every mistake is one sentence with the key's path."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevatron.config import dump_yaml, fingerprint, from_dict, load_yaml, to_dict
from bevatron.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    lr: float = 0.01
    name: Literal["adam", "adamw"] = "adam"
    steps: int | None = None


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    paths: tuple[Path, ...] = ()
    flags: dict[str, bool] = field(default_factory=dict)
    energies: Literal["fit"] | dict[str, float] = "fit"
    pair: tuple[int, float] = (1, 2.0)


@dataclass(frozen=True)
class Required:
    value: int


def test_round_trip_through_yaml(tmp_path):
    config = Outer(
        Inner(3e-4, "adamw", 5), (Path("a"), Path("b")), {"x": True}, {"H": -13.6}, (3, 0.5)
    )
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(config))
    assert from_dict(Outer, load_yaml(path)) == config


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_survive_yaml_exactly(number):
    import yaml

    text = yaml.safe_dump(to_dict(Inner(lr=number)))
    assert from_dict(Inner, yaml.safe_load(text)).lr == number


def test_number_without_a_dot_is_a_number():
    assert from_dict(Outer, {"inner": {"lr": "3e-4"}}).inner.lr == 3e-4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"iner": {}}, r"^iner: unknown key \(did you mean 'inner'\?\)$"),
        ({"inner": {"lrr": 1}}, r"^inner.lrr: unknown key \(did you mean 'lr'\?\)$"),
        ({"lr": 1}, r"^lr: unknown key \(did you mean 'inner.lr'\?\)$"),
        ({"inner": {"lr": "fast"}}, r"^inner.lr: expected a number, got 'fast'$"),
        ({"inner": {"lr": True}}, r"^inner.lr: expected"),
        ({"inner": {"name": "sgd"}}, r"^inner.name: expected one of 'adam', 'adamw', got 'sgd'$"),
        ({"inner": {"steps": 1.5}}, r"^inner.steps: expected a whole number, got 1.5$"),
        ({"inner": 3}, r"^inner: expected keys and values, got 3$"),
        ({"paths": "a"}, r"^paths: expected a list, got 'a'$"),
        ({"flags": {"x": 1}}, r"^flags.x: expected true or false, got 1$"),
        ({"energies": {"H": "?"}}, r"^energies.H: expected a number, got '\?'$"),
        ({"energies": {False: 1.0}}, r"^energies: expected text, got False; put a word such as no"),
        ({"energies": "fitted"}, r"^energies: expected 'fit' or keys and values, got 'fitted'$"),
        ({"inner": {"lr": None}}, r"^inner.lr: has no value; give a number, or take the key out"),
        ({"paths": None}, r"^paths: has no value; give a list, or take the key out"),
        ({"inner": None}, r"^inner: has no value; give keys and values, or take the key out"),
        ({"pair": [1]}, r"^pair: expected 2 values, got 1$"),
    ],
)
def test_mistake_is_one_sentence(values, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(Outer, values)


@dataclass(frozen=True)
class Checked:
    rate: float = 0.0

    def __post_init__(self) -> None:
        if self.rate > 1:
            raise ConfigError(f"inner.rate: expected at most 1, got {self.rate}")


@dataclass(frozen=True)
class Around:
    inner: Checked = field(default_factory=Checked)


@dataclass(frozen=True)
class AroundAll:
    model: Around = field(default_factory=Around)


def test_a_group_that_names_its_own_key_is_named_once():
    with pytest.raises(ConfigError, match=r"^model\.inner\.rate: expected"):
        from_dict(AroundAll, {"model": {"inner": {"rate": 2}}})
    with pytest.raises(ConfigError, match=r"^inner\.rate: expected"):
        from_dict(Around, {"inner": {"rate": 2}})


def test_missing_key_is_named():
    with pytest.raises(ConfigError, match=r"^value: missing$"):
        from_dict(Required, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "line 2: .*occurs twice"),
        ("a: [1\n", "line 2: not valid YAML"),
        ("a: \0\n", r"not valid YAML \([^\n]*\)$"),
        ("- 1\n", "expected keys and values"),
        ("a: {{ name }}\n", r"line 1: .*has a template such as \{\{ name \}\} not been filled in"),
        ("a:\n- [{{ name }}]\n", "line 2: .*has a template"),
        ("? [a, b]\n: 5\n", "line 1: .*expected a plain key"),
        ("a: 1\nb: 2026-31-11\n", "line 2: .*'2026-31-11' is not a valid date or number; put"),
        ("2026-13-01: 1\n", "line 1: .*'2026-13-01' is not a valid date"),
        ("a: !!int one\n", "line 1: .*'one' is not a valid date or number"),
        ("a: !!bool maybe\n", "line 1: .*'maybe' is not"),
        ("a: !!timestamp soon\n", "line 1: .*'soon' is not"),
        ("a: " + "9" * 5000, r"line 1: .*\('9{40}' is not"),
    ],
)
def test_broken_yaml_names_file_and_line(tmp_path, text, message):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_yaml(path)
    assert str(path) in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read"):
        load_yaml(tmp_path / "nothing.yaml")


def test_yaml_never_builds_objects(tmp_path):
    path = tmp_path / "evil.yaml"
    path.write_text("a: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(ConfigError):
        load_yaml(path)


def test_fingerprint_depends_on_values_only():
    assert fingerprint({"a": 1, "b": [1.0, None]}) == fingerprint({"b": (1.0, None), "a": 1})
    assert fingerprint(Outer()) != fingerprint(Outer(pair=(1, 2.5)))


def test_a_file_that_is_no_text_is_no_configuration(tmp_path):
    path = tmp_path / "weights.yaml"
    path.write_bytes(b"\x80\x04\x95\xff")
    with pytest.raises(ConfigError, match=r"weights\.yaml: is not text; expected a YAML file"):
        load_yaml(path)
