"""Every recipe runs on a tiny model, and says which hardware it is for."""

import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx

from cpjax.models import family, save_pretrained
from cpjax.models.common.checkpoint import read_json
from cpjax.train import loop
from cpjax.train.config import parse_config
from cpjax.train.metrics import read_metrics
from tests.data.common import make_folder, random_chats, write_jsonl

RECIPES = sorted((pathlib.Path(__file__).parent.parent.parent / "train" / "recipes").glob("*.yaml"))

SMALL = {"records.tokens": 96, "records.patches": 128, "records.shapes": 1, "run.steps": 1, "optimizer.warmup": 1,
         "mesh.cp": 2, "run.batch_size": 2, "run.accumulate": 1, "model.remat": "none"}  # fmt: skip
"""What tests change: sizes, and what makes programs slow to compile."""

KEPT = {
    "full": {"run.accumulate": 2, "mesh.cp": 1, "mesh.fsdp": 1},
    "kd": {"records.patches": 0, "mesh.fsdp": 1},
    "long": {"records.patches": 0, "run.batch_size": 1},
    "lora": {},
    "packed": {},
    "text": {"records.patches": 0, "mesh.fsdp": 1},
}
"""What is left of each recipe's own kind of program; the tower is in three of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with its tokenizer, and records with and without images."""
    path = tmp_path_factory.mktemp("recipes")
    sizes = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    files = make_folder(path / "files", **sizes)
    source = read_json(files / "config.json")
    module = family(source["model_type"])
    config, rng = module.Config.from_dict(source), np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(lambda: module.Model(config, rngs=nnx.Rngs(0))))
    state = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) / 8, leaf.dtype), state)
    save_pretrained(nnx.merge(graph, state), path / "model", companions=files)
    chats = random_chats(24)
    write_jsonl(path / "train.jsonl", chats)
    write_jsonl(path / "text.jsonl", [record for record in chats if "images" not in record])
    return path


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Compiles without optimization, in half the time."""
    make_step = loop.make_train_step

    def make(*args, **options):
        step = make_step(*args, **options)

        def run(*inputs):
            if isinstance(jax.tree.leaves(inputs[0])[0], jax.core.Tracer):
                return step(*inputs)
            return step.lower(*inputs).compile(compiler_options={"xla_backend_optimization_level": 0})(*inputs)

        return run

    monkeypatch.setattr(loop, "make_train_step", make)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_runs(recipe, folder, tmp_path):
    records = folder / ("train.jsonl" if KEPT[recipe.stem].get("records.patches", 1) else "text.jsonl")
    changed = SMALL | KEPT[recipe.stem] | {"run.out": tmp_path / "run", "model.path": folder / "model"}
    changed |= {"records.files": records, "records.broken": "skip"}
    if recipe.stem == "kd":
        changed["distill.teacher"] = folder / "model"
    given = [word for name, value in changed.items() for word in (f"--{name}", str(value))]
    config = parse_config(["--config", str(recipe), *given])
    assert loop.train(config, "virtual devices") == 0
    [record] = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert np.isfinite(record["loss"]) and record["grad_norm"] > 0 and record["valid_tokens"] > 0
    assert ("kl" in record) == (recipe.stem == "kd")
    assert (tmp_path / "run" / "export" / "config.json").is_file()
    assert (tmp_path / "run" / "adapter").is_dir() == (recipe.stem == "lora")
    shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_says_what_it_is_for(recipe):
    """Its mesh fits the GPUs that it names, and its command names its file and its options."""
    text = recipe.read_text()
    comment = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    [gpus] = re.findall(r"[Ff]or (?:one node of )?(\d+) (?:H100|H200|GPUs)", comment)
    mesh = yaml.safe_load(text)["mesh"]
    assert np.prod(list({name: size for name, size in mesh.items() if name != "layout"}.values())) == int(gpus)
    [command] = re.findall(r"python -m cpjax.train (.*)", comment)
    assert f"--config train/recipes/{recipe.name}" in command
    parse_config(["--config", str(recipe), *command.split()[2:]])
