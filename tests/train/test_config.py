"""Options: precedence, and every bad input is one sentence."""

import pathlib

import pytest
import yaml

from cpjax.models import family
from cpjax.train.config import (
    Config,
    ModelConfig,
    OptimizerConfig,
    ParameterGroup,
    RunConfig,
    make_parser,
    parse_config,
)
from cpjax.train.patterns import find
from cpjax.train.presets import model_config


def test_the_command_line_beats_the_file_which_beats_the_default(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("mesh: {cp: 2, fsdp: 2}\noptimizer: {lr: 3e-4, freeze: [visual]}\n")
    for arguments in (["--mesh.cp", "8", "--config", str(file)], [f"--config={file}", "--mesh.cp=8"]):
        config = parse_config(arguments)
        assert (config.mesh.cp, config.mesh.fsdp, config.mesh.dp) == (8, 2, 1)
        assert config.optimizer.lr == 3e-4 and config.optimizer.freeze == ["visual"]
        assert config.optimizer.betas == OptimizerConfig().betas


def test_yaml_round_trip(tmp_path):
    groups = [ParameterGroup("visual", lr_scale=0.1), ParameterGroup("norm", weight_decay=0.5)]
    optimizer = OptimizerConfig(betas=(0.5, 0.75), freeze=["a|b"], groups=groups)
    config = Config(run=RunConfig(out="x", seed=3), optimizer=optimizer)
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert parse_config(["--config", str(file)]) == config and optimizer.balance is None
    assert parse_config(["--config", str(file), "--optimizer.balance", "0.01"]).optimizer.balance == 0.01
    assert yaml.safe_load(config.to_yaml()) == config.to_dict()


def test_a_family_from_scratch_brings_groups_which_follow_those_given(tmp_path):
    scratch = ["--model.family", "step3p7"]
    [group] = parse_config(scratch).optimizer.groups
    config = model_config(ModelConfig(family="step3p7"))
    names = {weight.path: weight.names for weight in family("step3p7").weights(config)}
    [found] = find("optimizer.groups", [group.pattern], names)
    assert {path.removesuffix(".kernel").split(".")[-1] for path in found} == {"o_proj", "down_proj"}
    assert group.weight_decay == 20 and all(path.startswith("layers") for path in found)

    given = parse_config([*scratch, "--optimizer.groups", "[{pattern: norm}]"])
    assert [group.pattern for group in given.optimizer.groups] == ["norm", group.pattern]
    (tmp_path / "config.yaml").write_text(given.to_yaml())
    assert parse_config(["--config", str(tmp_path / "config.yaml")]) == given
    for others in ([], [*scratch, "--model.path", "folder"]):
        assert parse_config(others).optimizer.groups == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mesh.cq", "2"], "unknown option --mesh.cq: did you mean --mesh.cp?"),
        (["--mesh.c", "2"], "unknown option --mesh.c"),
        (["extra"], "unknown option extra"),
        (["--mesh.cp", "two"], "--mesh.cp: it must be a whole number, not two"),
        (["--mesh.cp", "2.5"], "--mesh.cp: it must be a whole number"),
        (["--mesh.cp", "0"], "--mesh.cp is 0: it must be at least 1"),
        (["--mesh.ep", "3"], "--mesh.ep is 3: it must be a divisor of mesh.cp, which is 4"),
        (["--optimizer.balance", "-1"], "--optimizer.balance is -1.0: it must be 0 or more"),
        (["--optimizer.balance", "much"], "--optimizer.balance: it must be"),
        (["--mesh.layout", "spiral"], "one of 'zigzag', 'contiguous', 'striped', 'packed', not spiral"),
        (["--optimizer.lr", "-1"], "--optimizer.lr is -1.0: it must be above 0"),
        (["--optimizer.lr", "nan"], "--optimizer.lr"),
        (["--optimizer.betas", "[0.9, 1.0]"], "--optimizer.betas"),
        (["--mesh.dp", "3", "--run.batch_size", "4"], "a multiple of mesh.dp x mesh.fsdp x run.accumulate, which is 3"),
        (["--run.accumulate", "4"], "a multiple of mesh.dp x mesh.fsdp x run.accumulate, which is 4"),
        (["--optimizer.ema", "1"], "--optimizer.ema is 1.0: it must be in [0, 1)"),
        (["--optimizer.groups", "[{patern: a}]"], "patern"),
        (["--optimizer.groups", "[{lr_scale: 2}]"], "pattern"),
        (["--lora.rank", "8"], "adapters need --model.path"),
        (
            ["--optimizer.groups", "[{pattern:visual,lr_scale:2}]"],
            "write pattern: visual, with a space after the colon",
        ),
        (["--optimizer.groups", "{pattern:visual}"], "such as [{pattern: visual, lr_scale: 0.1}], with a space after"),
        (["--run.seed", "4294967296"], "--run.seed is 4294967296: it must be 0 or more, and below 2**32"),
        (["--lora.merge", "true"], "--lora.merge is given without --lora.rank"),
        (["--lora.path", "adapter"], "give --lora.rank too"),
        (["--run.steps"], "--run.steps"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--config", "{folder}"], "not a file"),
        (["--config", "{file}"], "nexpected config"),
    ],
)
def test_bad_options(arguments, words, tmp_path):
    places = {"{folder}": str(tmp_path), "{file}": str(tmp_path / "recipe.yaml")}
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.raises(ValueError, match=r".") as error:
        parse_config([places.get(argument, argument) for argument in arguments])
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("mesh: {cpp: 3}", r"recipe.yaml: .*cpp"),
        ("mash: {cp: 3}", r"recipe.yaml: .*mash"),
        ("mesh: 3", "mesh"),
        ("mesh: {cp: null}", "mesh.cp"),
        ("mesh: [", r"recipe.yaml:2: expected"),
        ("nonsense", r"recipe.yaml: .*nonsense"),
    ],
)
def test_bad_files(text, word, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(text + "\n")
    with pytest.raises(ValueError, match=word) as error:
        parse_config(["--config", str(file)])
    assert "\n" not in str(error.value)


RECIPES = sorted((pathlib.Path(__file__).parents[2] / "train" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipes(file):
    """Each says what it is for and how to start it, and its options fit each other once a model is named."""
    said = file.read_text()
    assert "# For " in said and f"--config train/recipes/{file.name} --model.path MODEL" in said
    with pytest.raises(ValueError, match=r"need --model\.path"):
        parse_config(["--config", str(file)])
    config = parse_config(["--config", str(file), "--model.path", "MODEL", "--records.files", "a.jsonl"])
    assert config.records.files == ["a.jsonl"] and config.run.out == f"runs/{file.stem}"
    assert config.mesh.cp > 1


def test_every_option_has_a_sentence(capsys):
    for action in make_parser()._actions:
        if "." in action.dest:
            assert action.help and action.help.rstrip().endswith("."), action.dest
    with pytest.raises(SystemExit) as stop:
        parse_config(["--help"])
    assert stop.value.code == 0
    assert "--mesh.cp" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["__path__", "__default_config__", "__orig__"])
@pytest.mark.parametrize("section", ["model", "records", "optimizer"])
def test_names_that_the_parser_keeps_to_itself_are_no_options(tmp_path, section, name):
    file = tmp_path / "config.yaml"
    file.write_text(f"{section}: {{{name}: x}}\n")
    with pytest.raises(ValueError, match=f"{section}.{name}|{name}"):
        parse_config(["--config", str(file)])
