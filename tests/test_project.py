"""What holds the project together: import arrows, start-up budget, Makefile, and lists in the documents that must match the code."""

from __future__ import annotations

import ast
import os
import re
import resource
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from rlmismatch import __version__, cli
from rlmismatch.exitcodes import ExitCode
from rlmismatch.verdict.model import Word

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rlmismatch"
MODULES = sorted(PACKAGE.rglob("*.py"))
README = (ROOT / "README.md").read_text()
HELP_BUDGET_S = 0.3
# Modules that `--help` has no use for, each of which would cost more than the budget leaves.
HEAVY = {"megatron", "numpy", "rich", "safetensors", "torch", "transformers", "triton", "vllm", "yaml"}
# The only files that may import each of these, at module top or inside a function.
HOMES = {
    "megatron": ("engines/megatron*.py", "pins/megatron*.py"),
    "triton": ("kernels/*/triton*.py",),
    "vllm": ("engines/vllm*.py", "pins/vllm*.py"),
}


def run(*command: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, **kwargs)  # type: ignore[call-overload,no-any-return]


def imported_packages(source: str) -> set[str]:
    """Top-level names of every package that a source text imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


# Import rules


def test_import_arrows() -> None:
    done = run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Contracts: [1-9]\d* kept, 0 broken", done.stdout), done.stdout


@pytest.mark.parametrize("package", HOMES)
def test_only_its_own_modules_import(package: str) -> None:
    homes = {path for pattern in HOMES[package] for path in PACKAGE.glob(pattern)}
    importers = {path for path in MODULES if package in imported_packages(path.read_text())}
    assert importers, f"nothing imports {package}: the rule would hold for any name"
    assert {str(path.relative_to(ROOT)) for path in importers - homes} == set()


@pytest.mark.parametrize(
    ("source", "packages"),
    [
        ("import vllm.config", {"vllm"}),
        ("def f():\n    from vllm import LLM", {"vllm"}),
        ("from rlmismatch.engines import vllm", {"rlmismatch"}),
        ("from . import vllm", set()),
    ],
)
def test_imported_packages_sees_every_form_of_import(source: str, packages: set[str]) -> None:
    assert imported_packages(source) == packages


# Start-up


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["probe", "--help"], ["report", "--help"], ["axes"]], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = run(sys.executable, "-X", "importtime", "-m", "rlmismatch", *arguments)
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "click" in imported
    assert imported & HEAVY == set()


def test_help_starts_within_its_budget() -> None:
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run(sys.executable, "-m", "rlmismatch", "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # CPU time: what the start-up costs, whoever else is using the machine.
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert statistics.median(seconds) < HELP_BUDGET_S, seconds


# Makefile and scripts


def make_targets() -> dict[str, str]:
    """Phony target -> its ## comment."""
    text = (ROOT / "Makefile").read_text()
    described = dict(re.findall(r"^([a-z0-9-]+):.*?## (.+)$", text, re.MULTILINE))
    return {name: described.get(name, "") for name in re.findall(r"^\.PHONY: (\S+)$", text, re.MULTILINE)}


def test_make_without_a_target_lists_every_target() -> None:
    done = run("make")
    assert done.returncode == 0, done.stderr
    listed = dict(re.findall(r"^  ([a-z0-9-]+) +(\S.*)$", done.stdout, re.MULTILINE))
    assert listed == make_targets()
    assert all(listed.values())


@pytest.mark.parametrize("name", re.findall(r"`make ([a-z0-9-]+)", README + (ROOT / "CONTRIBUTING.md").read_text()))
def test_documents_name_only_targets_that_exist(name: str) -> None:
    assert name in make_targets()


@pytest.mark.parametrize("script", [ROOT / ".ci/run", *sorted((ROOT / "tools").rglob("*.sh"))], ids=lambda path: path.name)
def test_scripts_parse_and_stop_at_the_first_error(script: Path) -> None:
    assert run("bash", "-n", str(script)).returncode == 0
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text().splitlines()


def test_setup_names_the_device_it_does_not_know(tmp_path: Path) -> None:
    done = run("tools/setup.sh", str(tmp_path / "venv"), "tpu")
    assert done.returncode == 2
    assert "DEVICE is 'tpu'" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_setup_names_the_python_it_needs(tmp_path: Path) -> None:
    done = run("tools/setup.sh", str(tmp_path / "venv"), "cpu", env={**os.environ, "PYTHON": "/bin/false"})
    assert done.returncode == 7
    assert "Python 3.11 to 3.14 is needed" in done.stderr


# Documents against code


def table_of(text: str, heading: str) -> list[list[str]]:
    """Cells of the first table after a heading, without its head."""
    section = text.split(f"\n{heading}\n", 1)[1]
    rows = re.search(r"(?:^\|.*\|\n)+", section, re.MULTILINE)
    assert rows, f"no table under {heading}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows.group().splitlines()[2:]]


def test_readme_lists_every_command() -> None:
    assert [row[0] for row in table_of(README, "## Commands")] == [f"`rlmismatch {name}`" for name in cli.COMMANDS]


def test_readme_lists_every_exit_code() -> None:
    assert [row[0] for row in table_of(README, "## Exit codes")] == [str(int(code)) for code in ExitCode]


def test_readme_says_what_to_do_with_every_verdict() -> None:
    rows = table_of(README, "## What to do with each verdict")
    assert sorted(row[0] for row in rows) == sorted(get_args(Word))


def test_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[:2] == ["Unreleased", __version__]


def test_ci_runs_the_command_that_the_readme_gives() -> None:
    assert "make check" in (ROOT / ".ci/run").read_text()
    assert "`make check`" in README


def test_contributing_shows_where_every_module_stands() -> None:
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("```")[1]
    modules = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if not path.name.startswith("__")}
    assert {name for name in modules if not re.search(rf"\b{name}\b", tree)} == set()


@pytest.mark.parametrize("document", [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_markers_are_the_ones_that_the_documents_explain() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert [m for m in options["markers"] if f"`{m.partition(':')[0]}`" not in contributing] == []
