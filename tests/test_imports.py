"""The order of folders, and that importing onchip is free."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import onchip

PACKAGE = Path(onchip.__file__).parent
ORDER = ["core", "kernels", "dispatch", "ops", "cache", "models", "engine", "server"]
LEAVES = {"analysis": ORDER[:7], "bench": ORDER[:7], "integrations": ORDER[:5], "cli": [*ORDER, "analysis", "bench"]}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(file: Path):
    """(line, module) of every import of onchip's own modules, also those inside functions; a public name counts as the module it comes from."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} is a relative import; write onchip.…"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        ours = (name.removeprefix("onchip.") for name in names if name.startswith("onchip."))
        yield from ((node.lineno, onchip._HOME.get(name, f"onchip.{name}")) for name in ours)


def place(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_one_way(file):
    here = place(file)
    if here == "__init__":  # the public names may come from anywhere, lazily
        return
    assert here in ORDER or here in LEAVES, f"{here} has no place in the order"
    allowed = LEAVES.get(here) or ORDER[: ORDER.index(here)]
    for line, module in imports(file):
        there = module.split(".")[1]
        assert there == here or there in allowed, f"{file}:{line} imports {module}"


def test_implementations_do_not_import_each_other():
    """A kernel file may use what its family shares (`tile.py`, `mods.py`), but no file that a row of a menu names; the menus import none."""
    from onchip.dispatch import OPS

    rows = {kernel.entry.partition(":")[0] for op in OPS.values() for kernel in op.kernels}
    for file in (PACKAGE / "kernels").rglob("*.py"):
        for line, module in imports(file):
            if module.startswith("onchip.kernels."):
                assert file.name != "__init__.py" and not any(f"{module}.".startswith(f"{row}.") for row in rows), f"{file}:{line} imports {module}"


def loaded_by(statement: str) -> set[str]:
    """The modules of a fresh process that has run an import."""
    run = subprocess.run([sys.executable, "-c", f"{statement}\nimport sys; print(*sys.modules)"], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


SERVER = {"fastapi", "uvicorn", "pydantic", "prometheus_client", "llguidance", "ray"}


def test_importing_onchip_loads_nothing_heavy():
    assert not loaded_by("import onchip") & {"torch", "triton", "transformers", "gguf", "tokenizers", *SERVER}


def test_importing_the_operators_loads_no_dsl_and_no_framework():
    assert not loaded_by("from onchip import attention, rms_norm, explain, PagePool") & {"triton", "transformers", "gguf", "tokenizers", *SERVER}


@pytest.mark.parametrize("file", [file for file in FILES if place(file) != "server"], ids=lambda file: str(file.relative_to(PACKAGE)))
def test_what_only_the_server_needs_is_imported_in_functions(file):
    tops = [node for node in ast.parse(file.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in tops for alias in node.names} | {node.module for node in tops if isinstance(node, ast.ImportFrom)}
    assert not {name.partition(".")[0] for name in names} & SERVER


def test_every_public_name_resolves():
    for name in onchip.__all__:
        assert getattr(onchip, name) is not None
    assert set(dir(onchip)) == set(onchip.__all__)
    with pytest.raises(AttributeError, match="no attribute 'attentoin'"):
        _ = onchip.attentoin


def test_no_module_is_a_heap():
    """A helper lives with its owner or in core."""
    names = {part for file in FILES for part in file.relative_to(PACKAGE).with_suffix("").parts}
    assert not names & {"utils", "util", "common", "helpers", "misc", "shared"}


def test_files_keep_their_budget():
    """600 lines for a kernel file, 400 for any other."""
    for file in FILES:
        lines = len(file.read_text().splitlines())
        assert lines <= (600 if place(file) == "kernels" else 400), f"{file} has {lines} lines"


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_who_marks_gpu_tests():
    """The files with the tests, each its own: of GPU tests alone, others are not imported (`conftest.pytest_ignore_collect`)."""
    others = [file for file in Path(__file__).parent.rglob("*.py") if not file.name.startswith("test_") and file.name != "conftest.py"]
    assert others and not [file for file in others if "mark.gpu" in file.read_text()]
