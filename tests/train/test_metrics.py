"""The record of a run has each step once."""

from cpjax.train.metrics import MetricsLog, draw_metrics, read_metrics


def test_resume_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, step=0)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 1 / step, "accuracy": 0.5})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]

    log = MetricsLog(path, step=2)
    log.write({"step": 3, "loss": 0.25, "accuracy": 0.5, "held_out_accuracy": 0.75})
    log.close()
    records = read_metrics(path)
    assert [record["step"] for record in records] == [1, 2, 3] and records[2]["loss"] == 0.25

    picture = tmp_path / "curve.png"
    draw_metrics(records, picture, "a run")
    assert picture.read_bytes().startswith(b"\x89PNG")
