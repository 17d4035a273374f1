"""The benchmarks run, and what they compare computes the same."""

import json
import os
import pathlib
import subprocess
import sys

import jax

from tests.fast import FLAGS

ROOT = pathlib.Path(__file__).parent.parent


def test_all_contenders_agree_and_results_are_written(tmp_path):
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--out", str(tmp_path)],
        cwd=ROOT, env={**os.environ, **cache, "XLA_FLAGS": FLAGS}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    results = json.loads((tmp_path / "benchmarks.json").read_text())
    assert results["versions"]["jax"] == jax.__version__
    assert (tmp_path / "benchmarks.png").read_bytes().startswith(b"\x89PNG")

    rows = results["rows"]
    checked = [row for row in rows if "max_error" in row]
    assert {row["name"] for row in checked if row["part"] == "attention"} >= {
        "cpjax ring, zigzag",
        "cpjax ring, contiguous",
        "cpjax ring, packed",
        "cpjax allgather, zigzag",
        "cpjax ulysses, zigzag",
        "jax.nn.dot_product_attention",
    }
    for row in checked:
        assert row["max_error"] < (2e-2 if "bfloat16" in row["problem"] else 1e-5), row
    left_out = [row for row in rows if row["part"] not in ("layouts", "compile") and "max_error" not in row]
    assert all(row["note"] for row in left_out)

    steps = {row["name"] for row in rows if row["part"] == "train"}
    assert steps == {"cpjax, cp=1", "cpjax, cp=4", "transformers, torch"}

    dispatched = [row for row in rows if row["name"].startswith("dispatched")]
    assert len(dispatched) == 3 and all(row["bound"] <= row["imbalance"] <= 1.05 for row in dispatched)
    sent = {row["name"]: row["sent_of_held"] for row in rows if "sent_of_held" in row}
    assert sent["zigzag"] == 1 and sent.keys() == {"zigzag", "striped", "packed"}
    for row in rows:  # the table shows each of them
        assert row["problem"] in run.stdout and row["name"] in run.stdout


def test_an_unknown_part_is_told_in_one_sentence():
    run = subprocess.run([sys.executable, "-m", "benchmarks", "atention"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert "unknown part atention: choose of attention, recurrence, train, layouts, compile" in run.stderr
