"""Engines: fold a task over shards in this process or on a Dask cluster, with checkpoints to go on from."""

from massieu.engine.checkpoints import Checkpoint, CheckpointWarning
from massieu.engine.cluster import Dask
from massieu.engine.fold import ENGINES, Engine, engine_named, fold
from massieu.engine.local import Local
from massieu.engine.worker_roster import LostCluster

__all__ = [
    "ENGINES",
    "Checkpoint",
    "CheckpointWarning",
    "Dask",
    "Engine",
    "Local",
    "LostCluster",
    "engine_named",
    "fold",
]
