"""Sources of attention calls: transformers' interface, functions of torch, and :func:`massieu.attend`.

A source is patched when the first tap opens and restored when the last one closes, in any order of opening and closing.
It passes each call to all open taps, and each tap keeps the calls of its own model.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from massieu import statistics
from massieu.kernels.graphs import call_eagerly
from massieu.taps import translation
from massieu.taps.calls import Scores

__all__ = ["Fallback", "Observer", "Translate", "attach", "detach", "unobserved", "without_fast_path"]


# From the attention module and the number of its query rows (None if unknown) to its scores; None: not attention.
Translate = Callable[[nn.Module, int | None], Scores | None]


class Observer(Protocol):
    """Interface of an active tap."""

    def observe(self, module: nn.Module | None, translate: Translate, source: str) -> None:
        """Receive a call of the module (None: the running one) if the module belongs to this observer."""


class _Local(threading.local):
    paused = 0


_LOCK = threading.RLock()
_OBSERVERS: list[Observer] = []
_INSTALLED: set[Callable[[], bool]] = set()
_UNDO = contextlib.ExitStack()
_FAST_PATH: list[bool] = []  # the switch as found by each block that turned the fast path of torch off
_LOCAL = _Local()


def attach(observer: Observer, *, uncompiled: bool) -> None:
    """Pass calls of all sources loaded by now to an observer; ``uncompiled`` makes compiled code run eagerly."""
    with _LOCK:
        _OBSERVERS.append(observer)
        for install in (_interface, _attend, _fast_path, *((_compiler,) if uncompiled else ())):
            if install not in _INSTALLED and install():
                _INSTALLED.add(install)


def detach(observer: Observer) -> None:
    """Stop passing calls to an observer, and restore all sources after the last one."""
    with _LOCK:
        _OBSERVERS.remove(observer)
        if not _OBSERVERS:
            _INSTALLED.clear()
            _UNDO.close()


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Ignore calls inside the block: they are part of a call already observed, or of a receiver."""
    _LOCAL.paused += 1
    try:
        yield
    finally:
        _LOCAL.paused -= 1


def _notify(module: nn.Module | None, translate: Translate, source: str) -> None:
    for observer in list(_OBSERVERS):
        observer.observe(module, translate, source)


def _interface() -> bool:
    """Patch every function of transformers' attention interface under its own name, since masks depend on the name."""
    # A model that uses the interface has imported it.
    home = sys.modules.get("transformers.modeling_utils")
    interface = getattr(home, "AttentionInterface", None)
    mapping = getattr(interface, "_global_mapping", None)
    if interface is None or mapping is None:
        return False
    for name, function in list(mapping.items()):
        if not name.startswith("paged|"):
            observed = _observed(name, function)
            interface.register(name, observed)
            _UNDO.callback(_restore, mapping, name, observed, function)
    if "eager" not in mapping and hasattr(interface, "get_interface"):
        _eager(interface)
    return True


def _eager(interface: Any) -> None:
    """Patch the name "eager": a function in the model's own file, which the caller passes to ``get_interface``."""
    own = interface.get_interface

    @functools.wraps(own)
    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return _observed(name, default) if name == "eager" else own(self, name, default)

    interface.get_interface = get_interface
    _UNDO.callback(setattr, interface, "get_interface", own)


def _restore(mapping: dict[str, Any], name: str, observed: Any, function: Any) -> None:
    if mapping.get(name) is observed:
        mapping[name] = function


def _observed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that observers are notified after each call."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            result = function(*args, **kwargs)
        else:
            with unobserved():
                result = function(*args, **kwargs)
        call_eagerly(_notify_interface, name, function, args, kwargs, result)
        return result

    return wrapper


def _notify_interface(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    if _LOCAL.paused:
        return
    module = args[0] if args else kwargs["module"]
    _notify(module, lambda *_: translation.from_interface(name, function, args, kwargs, result), name)


def _attend() -> bool:
    """Patch :func:`massieu.attend` where the layers of ``massieu.nn`` look it up."""
    own = statistics.attend

    @functools.wraps(own)
    def attend(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        if not _LOCAL.paused:
            _notify(None, lambda *_: translation.from_attend(*args, **kwargs, result=result), "attend")
        return result

    statistics.attend = attend
    _UNDO.callback(setattr, statistics, "attend", own)
    return True


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """Turn off the fused encoder layers of torch, which hide their attention and differ in the last digits.

    All threads share the switch: the last block that ends restores it.
    """
    with _LOCK:
        _FAST_PATH.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _LOCK:
            found = _FAST_PATH.pop()
            if not _FAST_PATH:
                torch.backends.mha.set_fastpath_enabled(found)


def _fast_path() -> bool:
    """Make ``nn.MultiheadAttention`` and ``nn.TransformerEncoder`` call functions that can be observed."""
    _UNDO.enter_context(without_fast_path())
    return True


def _compiler() -> bool:
    """Run compiled code eagerly: it ignores new hooks, or recompiles around each of them."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        return False
    _UNDO.enter_context(torch.compiler.set_stance("force_eager"))
    return True


class Fallback(TorchFunctionMode):
    """Observation of ``scaled_dot_product_attention`` and softmax for one observer, while its model runs."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.observer = observer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function; if it computes attention, notify the observer."""
        kwargs = kwargs or {}
        if _LOCAL.paused or func not in _HANDLERS:
            return func(*args, **kwargs)
        return _HANDLERS[func](self.observer, func, args, kwargs)


def _observe_sdpa(observer: Observer, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = function(*args, **kwargs)
    observer.observe(None, lambda *_: translation.from_sdpa(*args, **kwargs, result=result), "sdpa call")
    return result


def _observe_softmax(observer: Observer, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = function(*args, **kwargs)
    scores = args[0] if args else kwargs["input"]
    dim = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
    observer.observe(None, lambda module, rows: translation.from_softmax(scores, dim, module, rows), "softmax")
    return result


def _observe_multihead(observer: Observer, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch, whose inner calls skip the mode, with observed functions in place of its globals."""
    names = {
        "scaled_dot_product_attention": functional.scaled_dot_product_attention,
        "softmax": functional.softmax,
    }
    observed = {name: lambda *a, _own=own, **k: _HANDLERS[_own](observer, _own, a, k) for name, own in names.items()}
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, **observed}, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy(*args, **kwargs)


_HANDLERS: dict[Any, Callable[[Observer, Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    functional.scaled_dot_product_attention: _observe_sdpa,
    functional.softmax: _observe_softmax,
    torch.softmax: _observe_softmax,
    torch.special.softmax: _observe_softmax,
    Tensor.softmax: _observe_softmax,
    functional.multi_head_attention_forward: _observe_multihead,
}
