"""Watch a model while it trains: readings of its attention, flags, logs and penalties."""

from massieu.monitor.flags import RULES, Rule
from massieu.monitor.log_sinks import open_sink
from massieu.monitor.logs import Log, read_log
from massieu.monitor.quantities import WATCHED
from massieu.monitor.reading import Flag, Place, Reading
from massieu.monitor.regularizers import Collected, collect, entropy_floor, logit_bound, z_loss
from massieu.monitor.watch_session import Watch, watch

__all__ = [
    "Collected",
    "Flag",
    "Log",
    "Place",
    "RULES",
    "Reading",
    "Rule",
    "WATCHED",
    "Watch",
    "collect",
    "entropy_floor",
    "logit_bound",
    "open_sink",
    "read_log",
    "watch",
    "z_loss",
]
