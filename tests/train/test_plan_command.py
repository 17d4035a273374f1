"""`--plan`: the step of a folder that holds nothing but config.json, compiled for GPUs that are not here."""

import dataclasses
import glob
import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest

from cpjax.models import FAMILIES, family
from cpjax.plan import Collective, Report, gpu_mesh
from cpjax.train.config import Config, MeshConfig, ModelConfig, PlanConfig, RecordsConfig, RunConfig
from cpjax.train.plan import describe, largest_batch, plan
from cpjax.train.task import read_model_config
from tests.models.families import CONFIGS
from tests.train.small import MODEL

# JAX caches such programs, and cannot read them back.
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry:UserWarning")


def test_the_bound_is_that_of_the_slowest():
    memory = {"arguments": 1 << 30, "outputs": 2 << 30, "temporaries": 0, "peak": 3 << 30, "host": 0}
    sent = (Collective("all-gather", 2, 45 << 20, ("gemm",)), Collective("all-gather", 1, 90 << 20, ()))
    report = Report(memory, sent, 80 << 30)
    lines = "\n".join(describe(report, "h200", devices=4, tokens=1000, flops=4 * 989e12 * 0.01))
    assert "fits" in lines and "1,000 tokens" in lines
    assert "all-gather              3 times         180.0 MiB, 50% of it beside computation" in lines
    assert "16-bit products: at least 10.00 ms" in lines
    assert f"reading and writing the state: at least {5 * 2**30 / 4.8e12 * 1e3:.2f} ms" in lines
    assert f"what is sent: at least {180 * 2**20 / 450e9 * 1e3:.2f} ms" in lines
    assert "at most 100,000 tokens/s, 25,000 a device, bound by 16-bit products" in lines


@pytest.fixture
def config(tmp_path):
    """Records that need not exist, for a model of which there are no weights."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL.to_dict()))
    return Config(
        model=ModelConfig(path=str(tmp_path)),
        records=RecordsConfig(files=["nowhere.jsonl"], tokens=1000, patches=256),
        mesh=MeshConfig(fsdp=2, cp=4),
        run=RunConfig(batch_size=2),
        plan=PlanConfig(gpu="h100"),
    )


def test_rows_are_as_long_as_records_may_be(config):
    batch, sharder = largest_batch(config, read_model_config(config))
    assert batch["input_ids"].shape == (2, sharder.padded_length) and sharder.length == 1000
    assert not batch["padding_mask"][:, :1000].any() and (batch["vision_segment_ids"] > 0).mean() > 0.75
    text = dataclasses.replace(config, records=dataclasses.replace(config.records, patches=0))
    assert "pixel_values" not in largest_batch(text, read_model_config(config))[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_every_family(config, name):
    """Patches are rounded up to whole tokens."""
    small = family(name).reduced(CONFIGS[name])
    records = dataclasses.replace(config.records, tokens=100, patches=130)
    batch, _ = largest_batch(dataclasses.replace(config, records=records), small)
    patches = batch["vision_segment_ids"]
    assert patches.shape[1] in range(130, 130 + small.vision.spatial_merge_size**2)
    assert (patches > 0).any() and (batch["document_ids"][:, :100] == 1).all()


def test_a_plan_says_what_a_step_takes(config, capsys):
    try:
        gpu_mesh({"cp": 8})
    except ValueError as error:
        pytest.skip(str(error))
    assert jax.default_backend() == "cpu" and plan(config) == 0
    said = capsys.readouterr().out
    for words in ("H100", "fsdp 2 x cp 4", "(fits in 81,008)", "sent per device", "collective-permute", "2,000 tokens"):
        assert words in said


def test_an_ordinary_run_says_nothing_of_cuda_where_there_is_no_gpu():
    """The plugin that compiles for GPUs is there, but neither cuDNN nor a GPU."""
    if importlib.util.find_spec("jax_plugins") is None:
        pytest.skip("the extra plan is not installed")
    if glob.glob("/dev/nvidia*"):
        pytest.skip("there is a GPU")
    code = "from cpjax.train.devices import set_up_devices as s; print(s(4))"
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout.startswith("4 virtual CPU devices") and result.stderr == ""
