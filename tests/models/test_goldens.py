"""What `python -m tests.models.make_goldens` wrote."""

import pathlib

FOLDER = pathlib.Path(__file__).parent / "goldens"


def test_golden_files_are_small_enough_for_the_repository():
    sizes = {path: path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()}
    assert len(sizes) > 10 and max(sizes.values()) < 1e6
