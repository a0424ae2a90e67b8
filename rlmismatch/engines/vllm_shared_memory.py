"""The shared memory of vLLM's ranks: a name of this run's own, and none any more once every rank has found it.

vLLM leaves a segment behind wherever a process ends without its shutdown, which takes a second and does not run after a crash: 8 MB
and 25 MB a run at TP2. A segment without a name goes with the last process that holds it.
"""

from __future__ import annotations

import contextlib
import glob
import platform
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch.distributed as dist

_FOLDER: Final = Path("/dev/shm")


@contextlib.contextmanager
def of_this_run(suffix: str = "") -> Iterator[None]:
    """While it lasts an engine may start; what its ranks share is theirs alone, and nameless when it ends. suffix: of this rank.

    The external launcher names the memory of the CPU's collectives after ``env://``: two runs on one host would share a segment, and mix
    their tensors. The host's name is part of ours because vLLM uses shared memory wherever all ranks have one name; ranks on several
    hosts then use gloo.
    """
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0)
    try:
        from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Communicator
    except ImportError:  # a build without CPU collectives
        yield
        _unname_broadcasts()
        return
    native = Communicator.make_group_name
    own = f"{platform.node()}-{name[0]}{suffix}"
    Communicator.make_group_name = staticmethod(lambda communicator: f"{own}-{communicator.unique_name}")
    try:
        yield
        _unname_broadcasts()
    finally:
        Communicator.make_group_name = staticmethod(native)
        for segment in _FOLDER.glob(f"{glob.escape(own)}*"):
            segment.unlink(missing_ok=True)  # by whichever rank comes first


def _unname_broadcasts() -> None:
    """The ring buffer in which the first rank hands Python objects to the others; they opened it before the engine had started."""
    from vllm.distributed import get_tp_group

    buffer = getattr(get_tp_group().mq_broadcaster, "buffer", None)
    if buffer is not None and buffer.is_creator:
        buffer.shared_memory.unlink()
        buffer.is_creator = False  # or it would be unlinked a second time when it is let go
