"""Reading of single forward passes: observation of a pass, alone or in a separate uncompiled run, and its sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from massieu.monitor.messages import error_summary
from massieu.monitor.observation import Observation
from massieu.monitor.reading import Place, Reading
from massieu.monitor.restore_state import restored_state
from massieu.monitor.step_counter import WeightUpdates
from massieu.monitor.sums import PlaceSums, to_reading
from massieu.taps.structure import is_compiled

__all__ = ["PassReader"]


class PassReader:
    """Readings of single forward passes of a model.

    Args:
        model: the model, compiled or not.
        wanted: names of the quantities to compute.

    Attributes:
        plain: the model without its compiled wrapper.
        runs_apart: whether a reading runs an uncompiled forward pass of its own.
        is_running: whether such a pass runs now.
        fallback: whether the next pass is observed outside of attention interfaces too.

    Example:
        >>> model = massieu.nn.Transformer(16, num_layers=2, num_heads=4, vocabulary=10)
        >>> reader, ids = PassReader(model, frozenset({"entropy"})), torch.tensor([[1, 2, 3]])
        >>> reader.begin(model, (ids,), {})
        ''
        >>> _ = model(ids)
        >>> bool(reader.reading(0, reader.sums(reader.end())).heads["entropy"].shape == (2, 4))
        True
    """

    def __init__(self, model: nn.Module, wanted: frozenset[str]) -> None:
        self.plain: nn.Module = getattr(model, "_orig_mod", model)
        self.runs_apart, self.is_running, self.fallback = is_compiled(model), False, True
        self._model, self._wanted = model, wanted
        self._updates = WeightUpdates(model)
        self._ratios: dict[str, float] = {}
        self._places: dict[tuple[str, int], Place] = {}
        self._vectors: dict[tuple[str, int], Tensor] = {}
        self._observation: Observation | None = None

    def store_weights(self) -> None:
        """Store the weights one step before a reading, if it compares them."""
        if "update_ratio" in self._wanted:
            self._updates.store()

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Observe the pass that begins, or a separate one; return a summary of the error of the latter, or ""."""
        self._ratios = self._updates.compare()
        places = self._places.values()
        observation = Observation(self._model, self._wanted, self._vectors, places, fallback=self.fallback)
        self._observation = observation
        if not self.runs_apart:
            observation.begin(module, args, kwargs)
            return ""
        self.is_running = True
        try:
            with restored_state(self.plain):
                self.plain(*args, **kwargs)
        except Exception as error:  # most likely of the model, which will raise it again
            observation.sums.clear()
            return error_summary(error)
        finally:
            self.is_running = False
        return ""

    def end(self) -> Observation | None:
        """Remove the hooks, and return the observation of the pass; None without one."""
        observation, self._observation = self._observation, None
        if observation is not None:
            observation.close()
        return observation

    def sums(self, observation: Observation) -> list[PlaceSums]:
        """Return the sums of a pass, with the updates of the weights before it."""
        for sums in observation.sums.values():
            ratio = self._ratios.get(sums.place.name.split("[")[0])
            if ratio is not None:
                sums.known["update_ratio"] = torch.tensor(ratio, dtype=torch.float64)
        return list(observation.sums.values())

    def reading(self, step: int, sums: list[PlaceSums]) -> Reading:
        """Return the reading of a step, with a row for every place of this and earlier readings."""
        self._places |= {(own.place.stack, own.place.layer): own.place for own in sums}
        return to_reading(step, tuple(self._places.values()), sums, self._wanted)
