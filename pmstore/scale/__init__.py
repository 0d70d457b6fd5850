"""Scale-out: algorithms over shards of data, on many processes or a dask cluster. See `pmstore.MapReduce`."""

from pmstore.scale._dask import Dask
from pmstore.scale._engine import Engine, Serial
from pmstore.scale._holder import Holder
from pmstore.scale._lazy import LazyParts
from pmstore.scale._local import Local
from pmstore.scale._mapreduce import MapReduce
from pmstore.scale._messages import Failure, Lost, Reply, Tag
from pmstore.scale._processes import Processes
from pmstore.scale._prune import prune_local
from pmstore.scale._shards import Shard, shards_of

__all__ = [
    "MapReduce",
    "Shard",
    "shards_of",
    "Engine",
    "Processes",
    "Dask",
    "Serial",
    "Holder",
    "LazyParts",
    "prune_local",
    "Local",
    "Tag",
    "Reply",
    "Lost",
    "Failure",
]
