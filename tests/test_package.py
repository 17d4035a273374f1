"""The wheel holds one top-level package with real files, whatever links the checkout uses."""

import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def test_wheel_holds_cpjax_only_with_every_module(tmp_path):
    tree = tmp_path / "tree"
    ignore = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignore)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, tree]
    subprocess.run(build, check=True)
    [wheel] = tmp_path.glob("*.whl")
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    assert {n.split("/")[0] for n in names} == {"cpjax"}
    modules = {str(p.relative_to(ROOT)) for top in ("cpjax", "models", "train") for p in (ROOT / top).rglob("*.py")}
    wanted = {re.sub("^(models|train)/", r"cpjax/\1/", m) for m in modules}
    assert wanted == {n for n in names if n.endswith(".py")}
    assert all(not (info.external_attr >> 16) & 0o020000 for info in zipfile.ZipFile(wheel).infolist()), "no links"


@pytest.mark.quick
def test_floors_import_downwards_only():
    """cpjax knows no model and no trainer; models know no trainer; a family knows no other family."""
    imports = re.compile(r"^\s*(?:from|import)\s+(cpjax[\w.]*)", re.M)
    families = [p.name for p in (ROOT / "models").iterdir() if (p / "config.py").exists()]
    for top, forbidden in {"cpjax": ("cpjax.models", "cpjax.train"), "models": ("cpjax.train",)}.items():
        for file in (ROOT / top).rglob("*.py"):
            if file.is_relative_to(ROOT / "cpjax" / "models") or file.is_relative_to(ROOT / "cpjax" / "train"):
                continue  # the links
            banned = list(forbidden)
            if top == "models" and file.parent != ROOT / "models":
                banned += [f"cpjax.models.{f}" for f in families if f not in file.parts]
            for name in imports.findall(file.read_text()):
                assert not f"{name}.".startswith(tuple(f"{ban}." for ban in banned)), (
                    f"{file.relative_to(ROOT)} imports {name}"
                )
