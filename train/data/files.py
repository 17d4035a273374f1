"""Files of records, opened for access by number: JSONL, JSON, parquet, and folders of `datasets.save_to_disk`."""

from __future__ import annotations

import abc
import bisect
import contextlib
import functools
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from cpjax.models.common.checkpoint import read_json
from cpjax.train.data.records import Record, RecordError, parse_record
from cpjax.train.errors import InputError


class RecordFile(abc.ABC):
    """The records of one file, by number.

    Attributes:
        path: the file or folder.
        folder: where the paths in its records begin.
    """

    def __init__(self, path: pathlib.Path, folder: pathlib.Path):
        self.path, self.folder = path, folder

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of records, broken ones too."""

    @abc.abstractmethod
    def value(self, index: int) -> Any:
        """The record as the file holds it."""

    @abc.abstractmethod
    def source(self, index: int) -> str:
        """ "file:line", or "file:record N" where records are no lines; both are counted from 1."""

    def __getitem__(self, index: int) -> Record:
        """The record in its normal form.

        Raises:
            RecordError: it is broken.
        """
        return parse_record(self.value(index), self.source(index), self.folder)


def open_records(path: str | pathlib.Path) -> RecordFile:
    """Opens a file of records by its name's ending, or a folder of `datasets.save_to_disk`.

    Raises:
        ValueError: no such file, or not a file of records.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        return _ArrowFolder(path)
    kinds: dict[str, Callable[[pathlib.Path], RecordFile]] = {
        ".jsonl": _JsonLines, ".json": _JsonList, ".parquet": _Parquet,
    }  # fmt: skip
    if path.suffix not in kinds:
        raise ValueError(f"{path} is no file of records: give .jsonl, .json, .parquet, or a folder of save_to_disk")
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give the path of a file of records")
    return kinds[path.suffix](path)


class Records(Sequence[Record]):
    """The records of several files, one after another."""

    def __init__(self, paths: Sequence[str | pathlib.Path]):
        """Raises ValueError for a path that cannot be opened, or when there is no record at all."""
        self.files = [open_records(path) for path in paths]
        self.ends = list(itertools.accumulate(map(len, self.files)))
        if not self.ends or not self.ends[-1]:
            raise ValueError(f"there is no record in {', '.join(map(str, paths)) or 'no files'}: give files with some")

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: Any) -> Any:
        """Raises RecordError for a broken record."""
        number = bisect.bisect_right(self.ends, index)
        return self.files[number][index - ([0, *self.ends][number])]


class _JsonLines(RecordFile):
    """One object a line; empty lines are passed over."""

    def __init__(self, path: pathlib.Path):
        super().__init__(path, path.parent)
        starts, lines, at = [], [], 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    starts.append(at)
                    lines.append(number)
                at += len(line)
        self.starts, self.lines = np.array(starts, np.int64), np.array(lines, np.int64)

    def __len__(self) -> int:
        return len(self.starts)

    def value(self, index: int) -> Any:
        with self.path.open("rb") as file:
            file.seek(self.starts[index])
            line = file.readline()
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RecordError("bad JSON", f"{self.source(index)} is not valid JSON ({error}): mend the line") from None

    def source(self, index: int) -> str:
        return f"{self.path}:{self.lines[index]}"


class _JsonList(RecordFile):
    """One list of objects, as LLaVA's files are."""

    def __init__(self, path: pathlib.Path):
        super().__init__(path, path.parent)
        try:
            self.values = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} is not valid JSON ({error}): mend it, or name it .jsonl if it has lines"
            ) from None
        if isinstance(self.values, dict):
            lists = [name for name, value in self.values.items() if value and isinstance(value, list)]
            own = " or ".join(f"its {name}" for name in lists if name not in ("messages", "conversations"))
            raise ValueError(
                f"{path} holds one object: it must be a list of records, so write [ ] around it"
                + (f", or, if these are records, keep {own} alone" if own else "")
                + ", or name it .jsonl if it is a line"
            )
        if not isinstance(self.values, list):
            raise ValueError(f"{path} holds {type(self.values).__name__}: it must be a list of records")

    def __len__(self) -> int:
        return len(self.values)

    def value(self, index: int) -> Any:
        return self.values[index]

    def source(self, index: int) -> str:
        return f"{self.path}:record {index + 1}"


class _Parquet(RecordFile):
    """Rows of a parquet file; a few row groups are kept in memory."""

    def __init__(self, path: pathlib.Path):
        super().__init__(path, path.parent)
        pyarrow = _pyarrow(path)
        with _reading(path):
            metadata = pyarrow.parquet.read_metadata(path)
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self.ends = list(itertools.accumulate(sizes))
        # Each call opens the file, since a reader may not be shared by threads.
        self.group = functools.lru_cache(maxsize=4)(lambda n: pyarrow.parquet.ParquetFile(path).read_row_group(n))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def value(self, index: int) -> Any:
        number = bisect.bisect_right(self.ends, index)
        first = index - ([0, *self.ends][number])
        with _reading(self.path):
            return _row(self.group(number), first)

    def source(self, index: int) -> str:
        return f"{self.path}:record {index + 1}"


class _ArrowFolder(RecordFile):
    """A folder of `datasets.save_to_disk`: arrow streams, mapped into memory."""

    def __init__(self, path: pathlib.Path):
        super().__init__(path, path)
        if (path / "dataset_dict.json").is_file():
            splits = read_json(path / "dataset_dict.json").get("splits", ())
            raise ValueError(f"{path} holds the splits {', '.join(splits)}: give the folder of one of them")
        if not (path / "state.json").is_file():
            raise ValueError(
                f"{path} is a folder without state.json: give one that datasets.save_to_disk wrote, or a file"
            )
        pyarrow = _pyarrow(path)
        try:
            shards = [path / file["filename"] for file in read_json(path / "state.json")["_data_files"]]
        except (KeyError, TypeError):
            raise ValueError(f"{path / 'state.json'} names no data files: save the folder again") from None
        tables = []
        for shard in shards:
            with _reading(shard):
                tables.append(pyarrow.ipc.open_stream(pyarrow.memory_map(str(shard))).read_all())
        self.table = pyarrow.concat_tables(tables)

    def __len__(self) -> int:
        return self.table.num_rows

    def value(self, index: int) -> Any:
        with _reading(self.path):
            return _row(self.table, index)

    def source(self, index: int) -> str:
        return f"{self.path}:record {index + 1}"


def _row(table: Any, index: int) -> Any:
    row = table.slice(index, 1)
    row.validate(full=True)  # a text may be said to lie outside of the file
    return row.to_pylist()[0]


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    """Says which file is damaged, which pyarrow does not; raises InputError."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())[:200]
        raise InputError(f"{path} is damaged ({why}): copy, download or save it again") from None


def _pyarrow(path: pathlib.Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path} needs pyarrow to be read: pip install 'cpjax[parquet]'") from None
    return pyarrow
