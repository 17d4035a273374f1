"""The tests themselves end, whatever becomes of a worker, and do not use up what a process may map."""

import os
import pathlib
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import pytest

from tests import conftest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.quick
@pytest.mark.skipif(not conftest.MAPS.exists(), reason="this system does not list a process's memory mappings")
def test_compiled_programs_are_dropped_before_memory_cannot_be_mapped(monkeypatch):
    def count():
        return conftest.MAPS.read_bytes().count(b"\n")

    double = jax.jit(lambda x: jnp.sin(2 * x).sum())
    double(jnp.zeros(1000))  # what is loaded once stays
    most = conftest.MOST_MAPS
    monkeypatch.setattr(conftest, "MOST_MAPS", 0)
    conftest.pytest_runtest_teardown()
    before = count()
    for size in range(1001, 1021):
        double(jnp.zeros(size))
    held = count() - before
    assert held > 3 * 20, "each program keeps mappings"
    monkeypatch.setattr(conftest, "MOST_MAPS", most)
    conftest.pytest_runtest_teardown()  # far from the limit nothing is dropped
    assert count() - before > held / 2
    monkeypatch.setattr(conftest, "MOST_MAPS", 0)
    conftest.pytest_runtest_teardown()
    assert count() - before < held / 4


DYING = """
import os, signal, pytest

@pytest.fixture(scope="module")
def made():
    os.kill(os.getpid(), signal.SIGSEGV)

@pytest.mark.parametrize("number", range(3))
def test_never_ends(number, made):
    pass
"""


def test_a_worker_that_dies_ends_the_tests(tmp_path):
    """In each of several files, so that workers that replace the dead one would die too."""
    for number in range(3):
        (tmp_path / f"test_dying_{number}.py").write_text(DYING)
        (tmp_path / f"test_living_{number}.py").write_text("def test_lives():\n    pass\n")
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = {options.replace('-n auto', '-n 2')}\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", tmp_path]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1, run.stdout
    assert "crashed while running" in run.stdout and "test_never_ends" in run.stdout
