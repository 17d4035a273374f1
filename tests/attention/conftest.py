import pytest

from cpjax.attention import tiles


@pytest.fixture
def short_tiles(monkeypatch):
    """Tiles of at most 8 tokens, so that short sequences have many."""
    monkeypatch.setattr(tiles, "MAX_TILE", 8)
