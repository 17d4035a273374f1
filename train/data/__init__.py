"""One's own chat records as rows: `Dataset.open(options, Encoder.from_folder(folder))`, then a `Stream` of batches."""

from cpjax.train.data.dataset import Dataset, Skipped
from cpjax.train.data.encode import Encoder
from cpjax.train.data.files import open_records
from cpjax.train.data.options import RecordsConfig
from cpjax.train.data.records import ImagePart, Message, Record, RecordError, TextPart, VideoPart
from cpjax.train.data.stream import Batch, Stream

__all__ = [
    "Batch", "Dataset", "Encoder", "ImagePart", "Message", "Record", "RecordError", "RecordsConfig", "Skipped",
    "Stream", "TextPart", "VideoPart", "open_records",
]  # fmt: skip
