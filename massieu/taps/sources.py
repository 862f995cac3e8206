"""The places where attention passes by: transformers' interface, functions of torch, and :func:`massieu.attend`.

Each place hands what it heard to :func:`announce`, which asks every open tap whether the module is its own. A place is
changed when the first tap opens and restored when the last one closes, in whatever order taps open and close.
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

__all__ = ["Fallback", "Listener", "Translate", "close", "open_", "unheard", "without_fast_path"]


# Of the module, and the number of its query rows if that is known, to what it computes; None if it is no attention.
Translate = Callable[[nn.Module, int | None], Scores | None]


class Listener(Protocol):
    """What an open tap can be asked."""

    def hear(self, module: nn.Module | None, translate: Translate, place: str) -> None:
        """Take a call of the module, or of the one that is running, if it is the listener's own."""


class _Local(threading.local):
    deaf = 0


_LOCK = threading.RLock()
_LISTENERS: list[Listener] = []
_PLACES: set[Callable[[], bool]] = set()
_UNDO = contextlib.ExitStack()
_SLOW: list[bool] = []  # for each that wants the fast path of torch off, how it found the switch
_LOCAL = _Local()


def open_(listener: Listener, *, uncompiled: bool) -> None:
    """Listen in every place that there is by now; ``uncompiled`` makes compiled code run as it is written."""
    with _LOCK:
        _LISTENERS.append(listener)
        for install in (_interface, _attend, _fast_path, *((_compiler,) if uncompiled else ())):
            if install not in _PLACES and install():
                _PLACES.add(install)


def close(listener: Listener) -> None:
    """Listen no more, and leave every place as it was if nobody else listens."""
    with _LOCK:
        _LISTENERS.remove(listener)
        if not _LISTENERS:
            _PLACES.clear()
            _UNDO.close()


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """What runs inside is part of a call that was heard already, or of a receiver."""
    _LOCAL.deaf += 1
    try:
        yield
    finally:
        _LOCAL.deaf -= 1


def _announce(module: nn.Module | None, translate: Translate, place: str) -> None:
    for listener in list(_LISTENERS):
        listener.hear(module, translate, place)


def _interface() -> bool:
    """Every function of transformers' attention interface, under its own name; masks go by the name."""
    # A model that uses the interface has imported it.
    home = sys.modules.get("transformers.modeling_utils")
    interface = getattr(home, "AttentionInterface", None)
    mapping = getattr(interface, "_global_mapping", None)
    if interface is None or mapping is None:
        return False
    for name, function in list(mapping.items()):
        if not name.startswith("paged|"):
            heard = _heard(name, function)
            interface.register(name, heard)
            _UNDO.callback(_put_back, mapping, name, heard, function)
    if "eager" not in mapping and hasattr(interface, "get_interface"):
        _eager(interface)
    return True


def _eager(interface: Any) -> None:
    """The name "eager" means a function of the model's own file, which only the caller of ``get_interface`` knows."""
    own = interface.get_interface

    @functools.wraps(own)
    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return _heard(name, default) if name == "eager" else own(self, name, default)

    interface.get_interface = get_interface
    _UNDO.callback(setattr, interface, "get_interface", own)


def _put_back(mapping: dict[str, Any], name: str, heard: Any, function: Any) -> None:
    if mapping.get(name) is heard:
        mapping[name] = function


def _heard(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, and afterwards an announcement of what it computed."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            result = function(*args, **kwargs)
        else:
            with unheard():
                result = function(*args, **kwargs)
        call_eagerly(_announce_interface, name, function, args, kwargs, result)
        return result

    return wrapper


def _announce_interface(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    if _LOCAL.deaf:
        return
    module = args[0] if args else kwargs["module"]
    _announce(module, lambda *_: translation.from_interface(name, function, args, kwargs, result), name)


def _attend() -> bool:
    """:func:`massieu.attend`, where the layers of ``massieu.nn`` look it up."""
    own = statistics.attend

    @functools.wraps(own)
    def attend(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        if not _LOCAL.deaf:
            _announce(None, lambda *_: translation.from_attend(*args, **kwargs, result=result), "attend")
        return result

    statistics.attend = attend
    _UNDO.callback(setattr, statistics, "attend", own)
    return True


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """Without the fused encoder layers of torch, which hide their attention and differ in the last digits.

    The switch is one for all threads: the last block that ends turns it back.
    """
    with _LOCK:
        _SLOW.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _LOCK:
            found = _SLOW.pop()
            if not _SLOW:
                torch.backends.mha.set_fastpath_enabled(found)


def _fast_path() -> bool:
    """``nn.MultiheadAttention`` and ``nn.TransformerEncoder`` leave out what could be heard, where they may."""
    _UNDO.enter_context(without_fast_path())
    return True


def _compiler() -> bool:
    """Compiled code does not look again for hooks, and would be compiled anew around each of them."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        return False
    _UNDO.enter_context(torch.compiler.set_stance("force_eager"))
    return True


class Fallback(TorchFunctionMode):
    """Hears ``scaled_dot_product_attention`` and softmax for one listener, while its model runs."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self.listener = listener

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function; if it is one of attention, hear it."""
        kwargs = kwargs or {}
        if _LOCAL.deaf or func not in _SOUNDS:
            return func(*args, **kwargs)
        return _SOUNDS[func](self.listener, func, args, kwargs)


def _hear_sdpa(listener: Listener, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = function(*args, **kwargs)
    listener.hear(None, lambda *_: translation.from_sdpa(*args, **kwargs, result=result), "sdpa call")
    return result


def _hear_softmax(listener: Listener, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = function(*args, **kwargs)
    scores = args[0] if args else kwargs["input"]
    dim = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
    listener.hear(None, lambda module, rows: translation.from_softmax(scores, dim, module, rows), "softmax")
    return result


def _hear_multihead(listener: Listener, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of torch that calls the others where no mode can see them: run its code with names that listen."""
    names = {
        "scaled_dot_product_attention": functional.scaled_dot_product_attention,
        "softmax": functional.softmax,
    }
    heard = {name: lambda *a, _own=own, **k: _SOUNDS[_own](listener, _own, a, k) for name, own in names.items()}
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, **heard}, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy(*args, **kwargs)


_SOUNDS: dict[Any, Callable[[Listener, Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    functional.scaled_dot_product_attention: _hear_sdpa,
    functional.softmax: _hear_softmax,
    torch.softmax: _hear_softmax,
    torch.special.softmax: _hear_softmax,
    Tensor.softmax: _hear_softmax,
    functional.multi_head_attention_forward: _hear_multihead,
}
