"""A corpus: documents in files of any size, cut into shards that can be read alone, anywhere, with the same result."""

from massieu.corpus.bad_records import BadRecord, BadRecords
from massieu.corpus.corpus import Corpus
from massieu.corpus.shards import Document, RecordFilter, Shard

__all__ = ["Corpus", "Document", "BadRecord", "BadRecords", "Shard", "RecordFilter"]
