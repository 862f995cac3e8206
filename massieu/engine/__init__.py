"""Where a text is read: in this process, or by the workers of a Dask cluster; with checkpoints to go on from."""

from massieu.engine.checkpoints import Checkpoint, CheckpointWarning
from massieu.engine.cluster import Dask
from massieu.engine.engines import ENGINES, Engine, Origin, engine_named
from massieu.engine.local import Local
from massieu.engine.worker_roster import LostCluster

__all__ = [
    "Checkpoint",
    "CheckpointWarning",
    "Dask",
    "ENGINES",
    "Engine",
    "Local",
    "LostCluster",
    "Origin",
    "engine_named",
]
