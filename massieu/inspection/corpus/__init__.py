"""A corpus: documents in files of any size, cut into splits that anyone can read alone, with the same result."""

from massieu.inspection.corpus.corpus import Corpus
from massieu.inspection.corpus.faults import Fault, Faults
from massieu.inspection.corpus.splits import Document, Split, Wanted

__all__ = ["Corpus", "Document", "Fault", "Faults", "Split", "Wanted"]
