"""The README's walk-through with one's own model and data, its commands as they stand there."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from cpjax.train.data import Encoder, open_records
from cpjax.train.metrics import read_metrics
from cpjax.train.records_task import last_answer
from tests.fast import FLAGS

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Starts a command of the walk-through in a folder of its own, in which `python` is this one."""
    folder = tmp_path_factory.mktemp("walk-through")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "bin" / "python").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": FLAGS,
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "walk-through"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start(command):
        command = f"set -euo pipefail\n{command}"
        return subprocess.Popen(
            ["bash", "-c", command], cwd=folder, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return folder, start


def finish(process):
    said, errors = process.communicate(timeout=900)
    assert process.returncode == 0, said + errors
    return said


def test_the_walk_through(shell):
    folder, start = shell
    part = (ROOT / "README.md").read_text().split("<!-- walk-through -->")[1].split("<!-- end -->")[0]
    make, inspect, train, resume, answer = re.findall(r"```bash\n(.*?)```", part, re.S)

    finish(start(make))
    assert len(list((folder / "walk" / "images").iterdir())) == 216
    said = finish(start(inspect))
    assert "record 1 of 200" in said and "64 patches" in said and "Yes.<|im_end|>" in said

    out = folder / "walk" / "run"
    process = start(train)
    while process.poll() is None and len(read_metrics(out / "metrics.jsonl")) < 4:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    said, errors = process.communicate(timeout=900)
    assert process.returncode == 128 + signal.SIGINT, said + errors
    stopped = int(re.search(r"stopped by SIGINT after step (\d+), which is saved", said)[1])
    assert "1 shape at most" in said and "compiled once" in said and stopped < 40

    said = finish(start(resume))
    assert f"resuming after step {stopped}" in said
    records = read_metrics(out / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 41))
    assert records[-1]["loss"] < records[0]["loss"] / 2
    assert records[-1]["held_out_loss"] < records[19]["held_out_loss"] < records[0]["loss"]
    assert 0 < records[-1]["held_out_exact"] <= 1

    said = finish(start(answer))
    lines = re.findall(r"^(.*) -> (.*) (\[.*\])$", said, re.MULTILINE)
    assert len(lines) == 8
    assert np.mean([given == wanted for wanted, given, _ in lines]) == records[-1]["held_out_exact"]
    merged, exported = folder / "walk" / "merged", out / "export"
    for name in ("tokenizer.json", "chat_template.jinja", "preprocessor_config.json"):
        copies = {(path / name).read_bytes() for path in (folder / "walk" / "tiny", merged, exported)}
        assert len(copies) == 1
    assert (merged / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    (folder / "tokens.json").write_text(json.dumps([json.loads(tokens) for *_, tokens in lines]))


def test_transformers_generates_the_same_tokens(shell):
    torch = pytest.importorskip("torch", reason="torch, which generates the wanted tokens, is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder, _ = shell
    merged = folder / "walk" / "merged"
    model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(merged).float().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    encoder = Encoder.from_folder(merged)
    wanted = json.loads((folder / "tokens.json").read_text())
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for record, tokens in zip(open_records(folder / "walk" / "held_out.jsonl"), wanted, strict=False):
        question = last_answer(encoder, record)
        ids = torch.tensor(question.prompt.input_ids[None])
        [image] = question.prompt.media
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=torch.tensor(image.patches),
            image_grid_thw=torch.tensor([image.grid]), mm_token_type_ids=(ids == model.config.image_token_id).long(),
            max_new_tokens=12, do_sample=False, eos_token_id=stop, pad_token_id=0,
        )  # fmt: skip
        assert made[0, ids.shape[1] :].tolist() == tokens
        assert tokenizer.decode(tokens) == encoder.tokenizer.decode(tokens, skip_special_tokens=False)
