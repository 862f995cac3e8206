"""Way of one attention score through the code: ``python tests/one_number.py`` writes docs/one-number.md."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "one-number.md"

INTRODUCTION = """# Follow one number

The entropy of a head, from a score inside a model to a cell of `report.html`: every hop with its file and line. The page is
drawn by `python tests/one_number.py`, and a test fails when a line has moved.

"""

HOPS = [
    (
        "taps/sources.py",
        "def _observed(",
        "The attention function of `transformers` is replaced by one that calls it and notifies the tap.",
    ),
    (
        "taps/translation.py",
        "def from_interface(",
        "Its arguments become queries, keys, scale and masks with the same meaning for every model.",
    ),
    (
        "taps/masks.py",
        "def read_mask(",
        "A mask becomes a log weight: minus infinity for keys that a row does not see.",
    ),
    ("taps/tap.py", "    def _call(", "Layer, stack and head count are added: this is one `AttentionCall`."),
    ("inspection/heads.py", "    def receive(", "The heads table receives the call, on one batch of passages."),
    (
        "taps/call_statistics.py",
        "def exact_rows(",
        "Each row of the call becomes numbers: its statistics, and the mass on named keys.",
    ),
    ("statistics/forward.py", "def row_statistics(", "Log Z, entropy, mean and variance of the scores of every row."),
    ("kernels/dispatch.py", "def forward(", "The kernel is chosen: compiled, or torch tiles."),
    (
        "kernels/native/forward.h",
        "    statistic[ENTROPY * rows]",
        "The entropy of one row, from one pass over its keys: H = log Z − E[s].",
    ),
    (
        "inspection/heads.py",
        "def _sums(",
        "Rows of a document are summed, without padding, special tokens and broken rows.",
    ),
    (
        "accumulators/streams.py",
        "    def add(self, document",
        "Documents are added up: sums, counts and their squares, whatever their number.",
    ),
    (
        "inspection/partial_result.py",
        "    def merge(self",
        "Partial results of shards are merged, from other processes too.",
    ),
    ("engine/local.py", "    def fold(", "The engine reads one shard after the other, and writes checkpoints."),
    (
        "accumulators/streams.py",
        "    def mean(self)",
        "The mean over all rows, and beside it the standard error by document.",
    ),
    ("inspection/heads.py", "    def table(self)", "One row of the heads table."),
    ("inspection/tables.py", "def build_inspection(", "Tables, facts and notes together are an `Inspection`."),
    (
        "inspection/quantities.py",
        "def _measured(",
        "The column gets its title, formula, unit and explanation, from `quantities.toml`.",
    ),
    (
        "inspection/findings.py",
        "def findings(",
        "Findings are computed from the tables: what the number means beside the others.",
    ),
    ("inspection/result.py", "    def save(", "Report, tables, JSON and figures are written together, or not at all."),
    ("report/pages.py", "def render(", "The page: a self-contained HTML file."),
]


def line_of(path: Path, text: str) -> int:
    """Number of the line that begins with a text, which must be one."""
    lines = path.read_text(encoding="utf-8").splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if line.startswith(text)]
    return found


def drawn() -> str:
    """The page with the lines of today."""
    hops = []
    for number, (file, text, sentence) in enumerate(HOPS, 1):
        line = line_of(ROOT / "massieu" / file, text)
        name = text.strip().removeprefix("def ").split("(")[0].split(" * ")[0]
        hops.append(f"{number}. [`{file}:{line}`](../massieu/{file}#L{line}) `{name}`: {sentence}")
    return INTRODUCTION + "\n".join(hops) + "\n"


if __name__ == "__main__":
    PAGE.write_text(drawn(), encoding="utf-8")
