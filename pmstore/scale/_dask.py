"""The engine on a dask cluster.

Each worker of the cluster has one actor with a `Holder`, and each epoch is one call of it for all its shards: a task
for each shard costs several times as much. An actor may be placed on another worker than was asked for, so that none
waits for a worker that never comes back. A thread for each actor waits for its replies, and finds a new place when
its worker is lost. The coordinator keeps the shards, and sends each to the actor that needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import queue
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from pmstore._errors import WorkersLostError
from pmstore.scale._engine import Engine
from pmstore.scale._gather import Gathering
from pmstore.scale._holder import Function, Holder, limited_threads
from pmstore.scale._memory import SHARE, available
from pmstore.scale._messages import Array, Lost, Reply, Tag, in_words
from pmstore.scale._routes import Question, Routes
from pmstore.scale._shards import Shard
from pmstore.scale._travel import packed

ANSWER = 10.0  # seconds that the scheduler may take to answer, at least
CHECK = 1.0  # seconds between looks at whether a worker, or the scheduler, is still there

_Batch = tuple[list[Question], bytes, Mapping[str, Array]]


class Dask(Engine):
    """An engine on the workers of a ``dask.distributed`` cluster.

    Parameters
    ----------
    client : dask.distributed.Client
        Connected; it stays open. The workers need pmstore and the packages of the algorithm.
    threads : int, default=1
        The number of threads of BLAS and OpenMP in a map.
    memory : int, optional
        The bytes that the shards of one worker may take. What has no room is loaded again for each epoch. None: 60 % of
        the limit that the worker has. Memory maps don't count.
    patience : float, default=60
        The seconds without any worker after which the fit ends with a `WorkersLostError`. The scheduler may take as
        long to answer, or 10 s.
    """

    def __init__(self, client: Any, *, threads: int = 1, memory: int | None = None, patience: float = 60.0) -> None:
        if not hasattr(client, "asynchronous"):
            raise TypeError(f"Dask takes a dask.distributed.Client, not {client!r:.80}")
        if client.asynchronous:
            raise ValueError("a fit waits for its workers: give a dask client that was made without asynchronous=True")
        self._client, self._threads, self._memory, self._patience = client, threads, memory, patience
        self._answers = True  # whether the scheduler does
        self._places: list[_Place] = []
        self._choosing = threading.Lock()  # held while the thread of a place takes a worker

    def start(self, shards: Sequence[Shard]) -> None:
        self.close()
        self._check()
        self._replies: queue.SimpleQueue[Reply | Lost | _Place] = queue.SimpleQueue()
        self._pickled: tuple[Any, bytes] = None, b""
        self._batches: dict[_Place, list[Question]] = {}
        self._shared: Mapping[str, Array] = {}
        travelling = [packed(shard, f"shard {i}, {shard},") for i, shard in enumerate(shards)]
        try:
            addresses = self._addresses()
            if not addresses:
                self._client.wait_for_workers(1, timeout=self._patience)
                addresses = self._addresses()
        except (OSError, TimeoutError, asyncio.TimeoutError):  # until Python 3.11 these are two
            raise self._without_workers() from None
        for _ in addresses[: len(shards)]:
            self._places.append(_Place(self, travelling))
        self._routes = Routes(self._places, len(shards), _Place.load)
        self._alone = time.monotonic()  # when a worker was there last

    def submit(self, i: int, function: Function, shared: Mapping[str, Array], tag: Tag) -> None:
        if self._pickled[0] is not function:
            self._pickled = function, packed(function, "the algorithm")
        if self._shared is not shared:
            self._flush()
            self._shared = shared
        place, times = self._routes.choose((i, tag))
        if not times:
            self._batches.setdefault(place, []).append((i, tag))

    def _flush(self) -> None:
        for place, questions in self._batches.items():
            place.ask((questions, self._pickled[1], self._shared))
        self._batches.clear()

    def completed(self, timeout: float | None) -> Sequence[Reply | Lost]:
        self._flush()
        until = float("inf") if timeout is None else time.monotonic() + timeout
        messages: list[Reply | Lost] = []
        while not messages:
            with contextlib.suppress(queue.Empty):
                self._take(self._replies.get(timeout=max(0.0, min(CHECK, until - time.monotonic()))), messages)
                while True:
                    self._take(self._replies.get_nowait(), messages)
            self._check()
            if time.monotonic() >= until:
                break
        return messages

    def _take(self, message: Reply | Lost | _Place, messages: list[Reply | Lost]) -> None:
        """A message of a thread: a place has answered, has found a worker again, or has lost the one that it had."""
        if isinstance(message, _Place):
            (self._routes.on_time if message.has_worker else self._routes.late)(message)
            return
        messages.append(message)
        for i in message.shards:
            self._routes.answered((i, message.tag))

    def cancel(self, tag: Tag) -> None:
        self._routes.drop(tag)

    def close(self) -> None:
        for place in self._places:
            place.end()
        self._places = []

    # ---- the cluster

    def _check(self) -> None:
        """Raise WorkersLostError if no worker can be had any more."""
        if self._client.status not in ("running", "connecting"):
            raise WorkersLostError(
                f"the dask client is {self._client.status}: the cluster's scheduler is gone, or the client was closed. "
                "Call again with a client of a running cluster; the fit continues after its last epoch."
            )
        now = time.monotonic()
        if not self._places or any(place.has_worker for place in self._places):
            self._alone = now
        elif now - self._alone > self._patience:
            raise self._without_workers()

    def _without_workers(self) -> WorkersLostError:
        what = "no worker" if self._answers else "a scheduler that does not answer"
        return WorkersLostError(
            f"the dask cluster has had {what} for {self._patience:g} s. Start workers, or call again with a client of "
            "a running cluster; the fit continues after its last epoch."
        )

    def _addresses(self) -> list[str]:
        """The addresses of the workers that the scheduler knows. Raises OSError or TimeoutError if it does not answer:
        `Client.scheduler_info` would wait for a stopped one without an end."""
        limit = max(self._patience, ANSWER)
        try:
            found = self._client.sync(self._client.scheduler.identity, callback_timeout=limit)
        except BaseException:  # not before the call: a thread of a place may be in it when the fit's thread reads this
            self._answers = False
            raise
        self._answers = True
        return list(found["workers"])

    def _free(self) -> str:
        """The address of a worker without an actor, or ""."""
        taken = [place.address for place in self._places]
        return next((address for address in self._addresses() if address not in taken), "")


class _Place:
    """The place of an actor: a thread that calls it, and makes another one when it is lost."""

    def __init__(self, engine: Dask, shards: list[bytes]) -> None:
        self._engine, self._shards = engine, shards
        self._inbox: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._open = 0
        self._ended = threading.Event()
        self._future: Any = None  # of the actor
        self._actor: Any = None
        self._sent: set[int] = set()  # the shards that the actor has
        self.address = ""
        self.name = ""
        self.has_worker = True  # until it turns out that there is none
        threading.Thread(target=self._work, daemon=True).start()

    def load(self) -> int:
        """The number of questions that it has."""
        return self._open

    def ask(self, batch: _Batch) -> None:
        """Ask the actor when it has answered its earlier questions."""
        self._open += len(batch[0])
        self._inbox.put(batch)

    def end(self) -> None:
        """Give the actor up. A map that runs on its worker ends by itself."""
        self._ended.set()
        self._inbox.put(None)

    def _work(self) -> None:
        tell = self._engine._replies.put
        with self._engine._client.as_current():
            while (batch := self._inbox.get()) is not None:
                questions = batch[0]
                try:
                    for answer in self._call(batch):
                        tell(answer)
                    tell(self)
                except Exception as error:
                    self.has_worker = False
                    tell(self)
                    for i, tag in questions:
                        tell(Lost(i, tag, self.name or "a dask worker", in_words(error)))
                    self._drop()
                    self._find_worker()
                self._open -= len(questions)
            self._drop()

    def _call(self, batch: _Batch) -> list[Reply | Lost]:
        questions, function, shared = batch
        if self._future is None:
            self._make()
        asked = [(i, tag, None if i in self._sent else self._shards[i]) for i, tag in questions]
        answer = self._actor.answer(asked, len(self._shards), function, shared)
        while True:
            try:
                answers: list[Reply | Lost] = answer.result(timeout=CHECK)
                break
            except (TimeoutError, asyncio.TimeoutError):
                if self._ended.is_set():
                    return []
                if self.address not in self._engine._addresses():
                    raise ConnectionError(f"the worker at {self.address} is gone") from None
        for one in answers:
            if isinstance(one, Reply):
                self._sent.update(one.shards)
        if any(isinstance(one, Lost) for one in answers):  # the scheduler has made the actor again, anywhere
            self._drop()
        return answers

    def _make(self) -> None:
        """Make an actor, on a worker that has none if there is one."""
        engine = self._engine
        with engine._choosing:
            self.address = free = engine._free()
        self._future = engine._client.submit(
            _Actor, engine._threads, engine._memory, actor=True, pure=False, key=f"pmstore-{uuid.uuid4().hex}",
            workers=[free] if free else None, allow_other_workers=bool(free),
        )  # fmt: skip
        self._actor = self._future.result(timeout=engine._patience)
        self.address = self._actor._address
        self.name = f"dask worker {self.address}"

    def _find_worker(self) -> None:
        """Wait for a worker without an actor, for a while, and make the actor there."""
        until = time.monotonic() + self._engine._patience
        while not self._ended.wait(CHECK) and self._engine._client.status in ("running", "connecting"):
            try:
                if not self._engine._free() and time.monotonic() < until:
                    continue
                self._make()
            except Exception:  # also without a scheduler, which the thread of the fit notices
                self._drop()
                continue
            self.has_worker = True
            self._engine._replies.put(self)
            return

    def _drop(self) -> None:
        """Let the actor go."""
        future, self._future = self._future, None
        actor, self._actor = self._actor, None
        self.address = ""
        self._sent.clear()
        for held in (future, getattr(actor, "_future", None)):  # both keep the actor, with its shards, on its worker
            if held is not None:
                with contextlib.suppress(Exception):
                    held.release()


class _Actor:
    """The part of a worker of the cluster: a holder, and its shards."""

    def __init__(self, threads: int, memory: int | None) -> None:
        from distributed import get_worker

        worker = get_worker()
        if memory is None:
            memory = int(SHARE * (getattr(worker.memory_manager, "memory_limit", None) or available()))
        self._threads = threads
        self._name = f"dask worker {worker.address}"
        self._holder = Holder(self._name, memory, threads)
        self._shards: dict[int, Shard] = {}
        self._function: tuple[bytes, Any] = b"", None

    def answer(
        self, asked: list[tuple[int, Tag, bytes | None]], count: int, function: bytes, shared: Mapping[str, Array]
    ) -> list[Reply | Lost]:
        """The replies to a batch of questions about some of `count` shards."""
        if function != self._function[0]:
            self._function = function, pickle.loads(function)
        gathering = Gathering(count)
        lost: list[Reply | Lost] = []
        with limited_threads(self._threads):
            for i, tag, shard in asked:
                if shard is not None:
                    self._shards[i] = pickle.loads(shard)
                if i not in self._shards:
                    lost.append(Lost(i, Tag(*tag), self._name, "its actor was made again, and has no shards"))
                    continue
                try:
                    reply = self._holder.answer(i, self._shards[i], self._function[1], shared, Tag(*tag))
                    gathering.put(reply, self._function[1], shared)
                except BaseException as error:  # dask would end the worker, and the next ones that get the question
                    lost.append(Lost(i, Tag(*tag), self._name, f"the map raised {error!r}"))
            return [*gathering.take(), *lost]
