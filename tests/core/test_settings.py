"""Environment variables: parsed anew, refused in words, and documented."""

import ast
from pathlib import Path

import pytest

import onchip
from onchip.core import settings
from onchip.core.settings import HF_HOME, INTERPRET, SETTINGS, STRICT

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("ON", True), ("yes", True), ("0", False), ("", False), ("No", False), ("off", False)]
)
def test_truth_values(monkeypatch, text, value):
    monkeypatch.setenv("ONCHIP_STRICT", text)
    assert STRICT.read() is value


@pytest.mark.parametrize("text", ["2", "ja", " 1"])
def test_what_is_no_truth_value(monkeypatch, text):
    monkeypatch.setenv("ONCHIP_STRICT", text)
    with pytest.raises(ValueError, match=f"ONCHIP_STRICT='{text}' is not a truth value; use 1 or 0"):
        STRICT.read()


def test_numbers(monkeypatch):
    number = settings.Setting("ONCHIP_NUMBER", int, 3, "A number.")
    assert number.read() == 3
    monkeypatch.setenv("ONCHIP_NUMBER", "17")
    assert number.read() == 17
    monkeypatch.setenv("ONCHIP_NUMBER", "many")
    with pytest.raises(ValueError, match="ONCHIP_NUMBER='many' is not a int"):
        number.read()


def test_paths(monkeypatch):
    monkeypatch.setenv("HF_HOME", "~/elsewhere")
    assert HF_HOME.read() == Path.home() / "elsewhere"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_defaults(monkeypatch, setting):
    monkeypatch.delenv(setting.name, raising=False)
    assert setting.read() == setting.default and isinstance(setting.default, setting.type)
    assert setting.about.endswith(".")


def test_defaults_are_quiet():
    assert STRICT.default is False and INTERPRET.default is False
    assert HF_HOME.default.name == "huggingface"


def test_every_variable_that_the_package_reads_is_in_the_table():
    """`os.environ` is read in one file."""
    for file in Path(onchip.__file__).parent.rglob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        assert file.name == "settings.py" or not names & {"environ", "getenv"}, f"{file} reads the environment; add a Setting"


def test_the_page_is_the_table():
    """docs/settings.md is made from `settings.table()`: its title, then the table."""
    title, _, rest = (ROOT / "docs" / "settings.md").read_text().partition("\n\n")
    assert title == "# Settings"
    assert rest == settings.table() + "\n"
