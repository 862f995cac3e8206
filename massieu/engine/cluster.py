"""Engine of a Dask cluster: workers read and merge, the driver keeps one partial result and reports progress."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import importlib.util
import json
import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from massieu.checks import UserError, check_count, pip_install
from massieu.corpus import Readable
from massieu.engine.checkpoints import Checkpoint, Ledger
from massieu.engine.driving import PULSE, Drive
from massieu.engine.fold import FoldTask, Progress
from massieu.engine.worker_roster import LostCluster, WorkerRoster, ended_workers
from massieu.kernels.threads import torch_threads

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["Dask", "LostCluster"]

LOOPBACK = "127.0.0.1"
CONNECTION = 15.0  # seconds for a scheduler to answer
FIRST = 60.0  # and for its first worker to come
# Dask would have workers give every piece of memory back at once, and a model asks for the same again and again: it
# would read half as fast.
ALLOCATION = {"distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": None}
GUARD = "worker processes import the file that starts them: put what it does under if __name__ == '__main__':"


class Dask:
    """Reads on the workers of a Dask cluster: a running one, or processes of this machine.

    Every worker loads the model once and reads with as many threads as the worker has. Partial results are merged on
    the workers, by a tree, and the driver merges about one for every checkpoint. A lost worker costs the shards that
    it was reading and nothing else. Servers that are started here bind to loopback only.

    Args:
        address: of a scheduler, or a ``distributed.Client``; None for a cluster of this machine's own processes.
        scheduler_file: what ``dask scheduler --scheduler-file`` wrote, instead of an address.
        workers: processes of a cluster that is started here, one thread each; None for one per core.
        announce: called with a sentence that names the address of the dashboard.

    Example:
        >>> with Dask(workers=1) as engine:  # doctest: +SKIP
        ...     massieu.inspect_model("gpt2", ["Call me Ishmael."], engine=engine)
    """

    def __init__(
        self,
        address: str | Client | None = None,
        *,
        scheduler_file: str | Path | None = None,
        workers: int | None = None,
        announce: Callable[[str], object] | None = None,
    ) -> None:
        if missing := [name for name in ("dask", "distributed") if importlib.util.find_spec(name) is None]:
            raise UserError(f"the engine dask needs {', '.join(missing)}, not installed; {pip_install('dask')}")
        if address is not None and scheduler_file is not None:
            raise UserError("a cluster has an address or a scheduler file, got both; choose one")
        if workers is not None and (address is not None or scheduler_file is not None):
            raise UserError("workers are for a cluster that is started here, and this one is there; leave them out")
        if workers is not None:
            check_count(workers, "workers", remedy="leave it out for one per core")
        if scheduler_file is not None:
            address = _address_in(Path(scheduler_file))
        self._address, self._workers = address, workers
        self._announce = announce
        self._client: Client | None = None
        self._open = contextlib.ExitStack()

    def fold(
        self,
        task: FoldTask,
        shards: Iterable[Readable],
        *,
        checkpoint: Checkpoint | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Partial result of all shards; see :class:`~massieu.engine.Engine`."""
        remote, ledger = task.remote(), Ledger(task, shards, checkpoint)
        with ledger.kept(), torch_threads(1):  # the others are for the workers, if they are here
            Drive(self.client, remote, ledger, progress).run()
        return ledger.partial

    def map(
        self, function: Callable[[Any], Any], given: Iterable[Any], /, *, lost: Callable[[Any], Any] | None = None
    ) -> Iterator[Any]:
        """Values of a function, each on some worker, in the order given; see :class:`~massieu.engine.Engine`.

        Futures rather than joblib's backend for Dask: that one waits for ever for a task that ends its workers, and
        computes in the driver if the cluster has a single thread.

        Example:
            >>> with Dask(workers=1) as engine:  # doctest: +SKIP
            ...     list(engine.map(math.sqrt, [1, 4]))
            [1.0, 2.0]
        """
        from distributed import KilledWorker, wait

        client = self.client  # a generator may outlive the engine
        roster = WorkerRoster(client)
        given, waiting = list(given), collections.deque[Any]()
        try:
            with roster.talking():
                roster.gather()
                waiting.extend(client.map(function, given, pure=False))
            while waiting:
                error = None
                with roster.talking():
                    roster.look()
                    with client.as_current(), contextlib.suppress(TimeoutError):
                        wait(waiting[0], timeout=PULSE)
                    if waiting[0].status == "pending":
                        continue
                    if waiting[0].status == "error":
                        error = waiting[0].exception()
                    else:
                        found = waiting[0].result()
                if isinstance(error, KilledWorker) and lost is not None:
                    found, error = lost(given[-len(waiting)]), None
                if error is not None:  # the task's own, whatever it is
                    raise error
                waiting.popleft()
                yield found
        except LostCluster as gone:
            raise LostCluster(f"{gone}; start again") from None
        except KilledWorker as error:
            raise LostCluster(f"a task {ended_workers(error)}") from None
        finally:
            roster.close()
            if waiting and client.status == "running":
                client.cancel(list(waiting))

    @property
    def client(self) -> Client:
        """Connection to the scheduler, made on first use."""
        if self._client is None:
            self._client = self._connected()
            if self._announce is not None and (link := self._client.dashboard_link):
                more = "" if importlib.util.find_spec("bokeh") else " (pip install bokeh shows more there)"
                self._announce(f"dashboard: {link}{more}")
        return self._client

    def close(self) -> None:
        """Disconnect from the cluster, and end it if it was started here."""
        self._client = None
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _connected(self) -> Client:
        from distributed import Client

        if isinstance(self._address, Client):
            return self._address
        if self._address is not None:
            _check_address(self._address)
        _hush(self._open)
        if self._address is None:
            return self._started()
        client = Client(self._address, timeout=CONNECTION, set_as_default=False)
        self._open.callback(client.close, timeout=2)
        if self._announce is not None and not client.scheduler_info()["workers"]:
            self._announce(f"waiting for workers of the scheduler at {self._address} ...")
        try:
            client.wait_for_workers(1, timeout=FIRST)
        except TimeoutError:
            raise UserError(
                f"no worker has come to the scheduler at {self._address} within {FIRST:.0f} s;"
                " start some with dask worker"
            ) from None
        return client

    def _started(self) -> Client:
        """Start a cluster of processes of this machine."""
        import dask
        from distributed import Client, LocalCluster

        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise SystemExit(GUARD)
        with _undisturbed():
            try:
                with dask.config.set(ALLOCATION):
                    started = LocalCluster(
                        n_workers=self._workers or os.cpu_count() or 1,
                        threads_per_worker=1,
                        processes=True,
                        host=LOOPBACK,
                        dashboard_address=f"{LOOPBACK}:0",
                        silence_logs=logging.CRITICAL,
                    )
            except RuntimeError as error:  # a worker ended before it had begun
                raise UserError(f"no worker process could be started ({error}); {GUARD}") from None
            cluster = self._open.enter_context(started)
            client: Client = self._open.enter_context(Client(cluster, set_as_default=False))
        return client


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Context in which new processes ignore interrupts for good, and this one postpones them to the end."""
    main, known = threading.current_thread() is threading.main_thread(), signal.getsignal(signal.SIGINT) is not None
    if not main or not known or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # its beginning would let interrupts through again
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # threads and processes take it over
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _address_in(file: Path) -> str:
    """Return the address that a scheduler has written into a file."""
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise UserError(f"there is no scheduler file {file}; dask scheduler --scheduler-file writes it") from None
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("address"), str):
        raise UserError(f"{file} must be what dask scheduler --scheduler-file wrote, got another file; check its name")
    return str(found["address"])


def _check_address(address: Any) -> None:
    """Raise unless a scheduler answers at the address; a client would wait for ever for any other server."""
    from distributed.comm.addressing import get_address_host_port, resolve_address

    try:
        host, port = get_address_host_port(resolve_address(address), strict=True)
        socket.create_connection((host, port), timeout=CONNECTION).close()  # which is refused at once, if it is
        # In a thread of its own: a notebook has a loop already.
        with ThreadPoolExecutor(1) as aside:
            kind = aside.submit(asyncio.run, _kind(address)).result()
    except (OSError, ValueError, TypeError) as error:
        text = " ".join(str(error).split())[:120]
        why = text or f"no answer for {CONNECTION:.0f} s"
        raise UserError(f"no scheduler answers at {address!r} ({why}); start one with dask scheduler") from None
    if kind != "Scheduler":
        raise UserError(
            f"the address must be that of a scheduler, got {address!r}, where a {kind} answers; pass the"
            " address that dask scheduler prints"
        )


async def _kind(address: Any) -> str:
    """Kind of the server at an address."""
    from distributed.comm.core import connect
    from distributed.core import send_recv
    from distributed.security import Security

    async def ask() -> Any:
        comm = await connect(address, timeout=CONNECTION, **Security().get_connection_args("client"))
        return await send_recv(comm, op="identity", close=True)

    found = await asyncio.wait_for(ask(), CONNECTION)
    return str(found.get("type")) if isinstance(found, dict) else "stranger"


def _hush(stack: contextlib.ExitStack) -> None:
    """Silence the loggers of Dask until the stack is closed: our errors say the same in one sentence."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "distributed"]
    for logger in map(logging.getLogger, names):  # each of them has a level of its own
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL + 1)
