"""Watch a model while it trains: the thermodynamics of its attention, read now and then."""

from massieu.monitor.reading import Flag, Place, Reading

__all__ = ["Flag", "Place", "Reading"]
