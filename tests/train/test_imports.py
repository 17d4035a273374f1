"""No file makes the trainer import what it names: not options, not a run's folder, not a saved batch."""

import contextlib
import dataclasses
import json
import pickle
import sys
import types
import typing

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cpjax.train.config import COMMANDS, Config, ParameterGroup, parse_command, parse_config
from cpjax.train.evaluate import read_data_config
from cpjax.train.export import export
from cpjax.train.replay import replay

MODULE = "imported_by_a_file"
CODE = """
import pathlib

pathlib.Path(__file__).with_suffix(".ran").touch()


class Evil:
    def __init__(self, pattern="a", lr_scale=1.0, weight_decay=None):
        pass


def call(*args):
    return Evil()
"""

SECTIONS = {field.name: typing.get_type_hints(field.default_factory) for field in dataclasses.fields(Config)}
PLACES = [(name,) for name in SECTIONS] + [(name, option) for name, options in SECTIONS.items() for option in options]
PLACES += [(), ("config",), ("print_config",), ("optimizer", "groups.help"), ("optimizer.groups",), ("cfg", "groups")]

VALUES = {
    "a class": {"class_path": f"{MODULE}.Evil"},
    "with arguments": {"class_path": f"{MODULE}.Evil", "init_args": {"pattern": "a"}},
    "a function": {"class_path": f"{MODULE}.call", "dict_kwargs": {}},
    "a name": f"{MODULE}.Evil",
    "a call": f"dict(class_path='{MODULE}.Evil')",
}

WRAPS = {
    "itself": lambda value: value,
    "in a list": lambda value: [value],
    "in lists": lambda value: [[value]],
    "a pattern": lambda value: [{"pattern": value}],
    "a rate": lambda value: [{"pattern": "a", "lr_scale": value}],
    "named": lambda value: {"a": value},
    "arguments": lambda value: {"init_args": value},
}


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    """A folder on the path, as the working directory is, with a module in it; how to see whether it ran."""
    folder = tmp_path_factory.mktemp("evil")
    (folder / f"{MODULE}.py").write_text(CODE)
    sys.path.insert(0, str(folder))

    @contextlib.contextmanager
    def nothing_ran():
        yield folder
        assert not (folder / f"{MODULE}.ran").exists() and MODULE not in sys.modules

    yield nothing_ran
    sys.path.remove(str(folder))


def parts(hint):
    """The types that a type hint is made of."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {type(value) for value in inner}
    if origin in (list, tuple, types.UnionType, typing.Union):
        return set().union(*map(parts, inner))
    return {hint}


def test_options_hold_no_class_but_groups_which_are_read_here():
    plain = {int, float, str, bool, type(None)}
    held = {f"{name}.{option}": parts(hint) for name, options in SECTIONS.items() for option, hint in options.items()}
    assert {option for option, hints in held.items() if hints - plain} == {"optimizer.groups"}
    assert held["optimizer.groups"] == {ParameterGroup}
    assert all(parts(hint) <= plain for hint in typing.get_type_hints(ParameterGroup).values())


@settings(max_examples=25)
@given(st.sampled_from(PLACES), st.sampled_from(sorted(VALUES)), st.sampled_from(sorted(WRAPS)), st.booleans())
def test_no_value_is_imported_wherever_it_stands(evil, place, value, wrap, in_file):
    value = WRAPS[wrap](VALUES[value])
    with evil() as folder, contextlib.suppress(ValueError, SystemExit):  # a text may well be a file's name
        if in_file:
            tree = value
            for name in reversed(place):
                tree = {name: tree}
            (folder / "options.yaml").write_text(yaml.safe_dump(tree))
            parse_config(["--config", str(folder / "options.yaml")])
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            parse_config([f"--{'.'.join(place) or 'class_path'}", text])


GROUPS = "optimizer: {groups: [%s]}"
FILES = {
    GROUPS % f"{{class_path: {MODULE}.Evil}}": "optimizer.groups: a group has a pattern, .* not class_path",
    GROUPS % f"{MODULE}.Evil": "optimizer.groups: a group has a pattern, .* not 'imported_by_a_file.Evil'",
    GROUPS % f"{{pattern: a, class_path: {MODULE}.Evil}}": "optimizer.groups: .* class_path",
    f"model: {{class_path: {MODULE}.Evil}}": "model.class_path",
    f"class_path: {MODULE}.Evil": "class_path",
    f"model: !!python/object/apply:{MODULE}.call []": "python/object/apply",
    f"model: {{path: !!python/name:{MODULE}.Evil }}": "python/name",
}


@pytest.mark.parametrize("text", FILES)
def test_every_command_refuses_options_that_name_a_class(evil, text, tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(text)
    np.savez(run / "nonfinite-1.npz", input_ids=np.zeros((1, 4), int))
    with evil():
        for command in COMMANDS:
            extra = [f"--{command}"] if command != "train" else ["--run.resume", "true"]
            with pytest.raises(ValueError, match=FILES[text]):
                parse_command(["--config", str(run / "config.yaml"), "--run.out", str(run), *extra])
        with pytest.raises(ValueError, match=FILES[text]):
            export(run, tmp_path / "out", "last")
        with pytest.raises(ValueError, match=FILES[text]):
            replay(run / "nonfinite-1.npz")


class Payload:
    def __reduce__(self):
        import importlib

        return importlib.import_module, (MODULE,)


@pytest.mark.quick
def test_neither_cards_nor_saved_batches_do(evil, tmp_path):
    tag = f"!!python/object/apply:{MODULE}.call []"
    for data in (tag, f"{{class_path: {MODULE}.Evil}}", f"{{images: {tag}}}", f"{{images: {MODULE}.Evil}}"):
        (tmp_path / "README.md").write_text(f"---\ntags: [cpjax]\ncpjax: {{data: {data}}}\n---\n")
        with evil(), pytest.raises(ValueError, match="does not say which documents"):
            read_data_config(tmp_path / "README.md")
    file = tmp_path / "nonfinite-1.npz"
    np.savez(file, input_ids=np.array([Payload()], object))
    pickled = pickle.dumps(Payload())
    for damaged in (file.read_bytes(), pickled, file.read_bytes()[:200], b""):
        file.write_bytes(damaged)
        with evil(), pytest.raises(ValueError, match="does not hold the arrays that a run has saved"):
            replay(file)
