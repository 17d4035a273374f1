"""Time, memory and balance of cpjax beside its peers: `python -m benchmarks --help`."""
