"""The house's outer walls: a light import, one set of versions everywhere, and commands that exist."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("module", ["gctutor", "gctutor.cli"])
def test_import_is_light(module):
    heavy = "{'torch', 'transformers', 'matplotlib', 'pandas', 'scipy', 'IPython', 'papermill'}"
    assert run_python(f"import sys, {module}; print({heavy} & set(sys.modules))") == "set()\n"


def test_import_takes_less_than_100_ms():
    code = "import time; start = time.perf_counter(); import gctutor; print(time.perf_counter() - start)"
    assert min(float(run_python(code)) for _ in range(3)) < 0.1


def test_python_m_gctutor_is_the_command():
    answer = subprocess.run(
        [sys.executable, "-m", "gctutor", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "gctutor [OPTIONS] COMMAND" in answer.stdout


def plain(name: str) -> str:
    """A requirement's name alone, spelled as package indexes do."""
    return re.match(r"[\w.-]+", name.strip())[0].lower().replace("_", "-")


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {plain(line): line for line in lines if line and not line.startswith("#")}


def installed_extras() -> set[str]:
    return set(re.search(r"^EXTRAS := (.+)$", (ROOT / "Makefile").read_text(), re.M)[1].split(","))


def test_everything_that_is_installed_has_a_tested_version():
    wanted = list(PROJECT["dependencies"])
    for extra in installed_extras():
        wanted += PROJECT["optional-dependencies"][extra]
    assert {plain(name) for name in wanted} <= constraints().keys()


def test_constraints_are_exact_but_for_triton_which_torch_chooses():
    loose = [name for name, line in constraints().items() if not re.fullmatch(r"[\w.-]+==[\w.]+", line)]
    assert loose == ["triton"]


def test_the_tests_run_on_the_tested_torch():
    installed = run_python("import importlib.metadata as m; print(m.version('torch'))").strip()
    assert installed.split("+")[0] == constraints()["torch"].removeprefix("torch==")


def test_ruff_is_pinned_alike():
    (ruff,) = (name for name in PROJECT["optional-dependencies"]["dev"] if plain(name) == "ruff")
    assert ruff == constraints()["ruff"]


def test_environment_yml_installs_what_the_makefile_does():
    yaml = pytest.importorskip("yaml")
    python, pip, section = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert pip == "pip" and python.removeprefix("python=") in PROJECT["requires-python"]
    constraint, torch, package = section["pip"]
    assert constraint == "--constraint constraints.txt"
    assert torch == constraints()["torch"]
    assert f"TORCH ?= {torch}\n" in (ROOT / "Makefile").read_text()
    assert set(re.fullmatch(r"--editable \.\[(.+)\]", package)[1].split(",")) == installed_extras()


def test_the_readmes_commands_exist(capsys):
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z]+):.* ##", (ROOT / "Makefile").read_text(), re.M))
    assert {"notebooks", "test", "lab", "check", "refresh"} <= targets
    assert set(re.findall(r"\bmake ([a-z]+)", readme)) <= targets

    from gctutor import cli

    used = set(re.findall(r"^gctutor ([a-z]+)", readme, re.M))
    assert used
    for command in used:
        assert cli.main([command, "--help"]) == 0


def test_the_readmes_package_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(compile(example, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["none", "block", "sub"]
    assert any(line.startswith('with parse("modules:') for line in lines[3:])
