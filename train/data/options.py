"""The options of training on one's own records."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Literal


@dataclasses.dataclass(frozen=True)
class RecordsConfig:
    """Records: your own chats; they need --model.path, whose tokenizer, chat template and processor they go through

    Raises:
        ValueError: a value outside its range.
    """

    files: list[str] = dataclasses.field(default_factory=list)
    """Files of chat records: .jsonl, .json, .parquet, or folders of datasets.save_to_disk; several as
    a.jsonl,b.parquet. None: the default job, the handwritten digits of the section data."""
    held_out: list[str] = dataclasses.field(default_factory=list)
    """Files of records to evaluate on, all of them each time; each is a set, which NAME=FILE gives a name."""
    answers: int = 0
    """Records of each held-out set whose last answer the model is to write itself; right is what equals the record."""
    max_new_tokens: int = 64
    """Largest length of such an answer, in tokens."""
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
        for name in ("tokens", "shapes", "workers", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--records.{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("patches", "answers"):
            if getattr(self, name) < 0:
                raise ValueError(f"--records.{name} is {getattr(self, name)}: it must be 0 or more")
        if self.held_out and not self.files:
            raise ValueError("--records.held_out is given without --records.files: give the records to train on too")
        if self.answers and not self.held_out:
            raise ValueError(f"--records.answers is {self.answers}: give --records.held_out, the records to ask, too")
        if len(self.held_out_sets) < len(self.held_out):
            raise ValueError(
                f"--records.held_out is {self.held_out}: give files of one name different ones, as in NAME=FILE"
            )

    @property
    def held_out_sets(self) -> dict[str, str]:
        """The held-out files by the names of their sets."""
        pairs = [entry.rpartition("=") for entry in self.held_out]
        return {name or pathlib.PurePath(file).stem: file for name, _, file in pairs}
