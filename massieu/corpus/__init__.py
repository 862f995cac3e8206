"""A corpus: documents in files of any size, cut into splits that anyone can read alone, with the same result."""

from massieu.corpus.bad_records import Fault, Faults
from massieu.corpus.corpus import Corpus
from massieu.corpus.shards import Document, Split, Wanted

__all__ = ["Corpus", "Document", "Fault", "Faults", "Split", "Wanted"]
