"""The record of a run has each step once, and its picture hides none."""

from matplotlib.figure import Figure

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


def test_no_legend_lies_on_a_line_and_each_line_is_named(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))
    records = [{"step": n, "loss": 1 / n, "accuracy": 1 - 1 / n} for n in range(1, 9)]
    records[-1] |= {"held_out_loss": 0.5, "held_out_exact": 0.25}
    draw_metrics(records, tmp_path / "curves.png", "a run\nof two lines")
    [figure] = figures
    figure.draw_without_rendering()
    names = []
    for axes in figure.axes:
        legend = axes.get_legend()
        assert not legend.get_window_extent().overlaps(axes.get_window_extent())
        assert not legend.get_window_extent().overlaps(figure._suptitle.get_window_extent())
        names.append([text.get_text() for text in legend.get_texts()])
        assert len(axes.lines) == len(names[-1]) and "training" not in axes.get_ylabel()
    assert names == [["training tokens", "held out"], ["training tokens", "held-out answers"]]
