"""A corpus: documents in files of any size, cut into shards that can be read alone, anywhere, with the same result."""

from massieu.corpus.bad_records import BadRecord, BadRecords
from massieu.corpus.corpus import Corpus
from massieu.corpus.document_counts import DocumentCounts
from massieu.corpus.shards import Document, Readable, RecordFilter, Shard

__all__ = ["BadRecord", "BadRecords", "Corpus", "Document", "DocumentCounts", "Readable", "RecordFilter", "Shard"]
