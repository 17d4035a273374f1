"""The trainer: `python -m cpjax.train`."""
