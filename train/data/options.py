"""The options of training on one's own records."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class RecordsConfig:
    """Records

    Raises:
        ValueError: a value outside its range.
    """

    files: list[str] = dataclasses.field(default_factory=list)
    """Files of chat records: .jsonl, .json, .parquet, or folders of datasets.save_to_disk."""
    broken: Literal["stop", "skip"] = "stop"
    """What to do about a record that is broken or too long: stop and name it, or skip and count it."""
    tokens: int = 4096
    """Largest length of a row, in tokens; a longer record counts as broken."""
    patches: int = 16384
    """Largest number of image patches of a row; a record with more counts as broken."""
    pack: bool = True
    """Put several short records into a row; they do not see each other."""
    shapes: int = 3
    """Different shapes of rows, each half of the next; the training step is compiled once for each."""
    workers: int = 4
    """Threads that read and decode ahead."""

    def __post_init__(self) -> None:
        for name in ("tokens", "shapes", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--records.{name} is {getattr(self, name)}: it must be at least 1")
        if self.patches < 0:
            raise ValueError(f"--records.patches is {self.patches}: it must be 0 or more")
