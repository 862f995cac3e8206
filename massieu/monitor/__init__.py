"""Watch a model while it trains: the thermodynamics of its attention, read now and then."""

from massieu.monitor.flags import RULES, Rule
from massieu.monitor.quantities import WATCHED
from massieu.monitor.reading import Flag, Place, Reading
from massieu.monitor.watching import Watch, watch

__all__ = ["Flag", "Place", "RULES", "Reading", "Rule", "WATCHED", "Watch", "watch"]
