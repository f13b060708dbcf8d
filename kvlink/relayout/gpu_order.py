"""Events and streams of an engine, whatever library they come from, as the driver's handles.

CUDA's runtime and driver share them: a ``cudaEvent_t`` is a ``CUevent``, a ``cudaStream_t`` a ``CUstream``.
"""

from __future__ import annotations

from kvlink.errors import LayoutError


def event_handle(event: object) -> int:
    """The handle of a recorded event: an integer, torch's (``cuda_event``), CuPy's (``ptr``) or KVLink's (``handle``).

    Raises:
        LayoutError: it is none of these, or was never recorded and so has no handle.
    """
    handle = _handle(event, ("cuda_event", "ptr", "handle"))
    if not handle:
        raise LayoutError(f"{event!r} is no recorded CUDA event; pass an event after recording it, or its handle")
    return handle


def stream_handle(stream: object) -> int:
    """The handle of a stream: an integer (0 is the default stream), torch's (``cuda_stream``), CuPy's, or KVLink's.

    Raises:
        LayoutError: it is none of these.
    """
    handle = _handle(stream, ("cuda_stream", "ptr", "handle"))
    if handle is None and hasattr(stream, "__cuda_stream__"):
        handle = int(stream.__cuda_stream__()[1])
    if handle is None:
        raise LayoutError(f"{stream!r} is no CUDA stream; pass one of torch's or CuPy's, or its handle")
    return handle


def _handle(thing: object, names: tuple[str, ...]) -> int | None:
    if isinstance(thing, bool) or thing is None:
        return None
    if isinstance(thing, int):
        return thing if thing >= 0 else None
    for name in names:
        value = getattr(thing, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
