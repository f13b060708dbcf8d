"""Caches on a GPU are described by what their arrays say: nothing of them is touched, and no GPU is needed."""

import itertools

import numpy as np
import pytest
from geometries import identity_of, rank_spec

from kvlink.errors import LayoutError
from kvlink.layout import DType
from kvlink.memory import Caches, PlaneKey, Span
from kvlink.relayout.gpu_order import event_handle, stream_handle

SPEC = rank_spec("apart", dtype=DType.FLOAT16, identity=identity_of(num_layers=1))
GROUP = SPEC.groups[0]
SHAPE = GROUP.num_blocks, GROUP.block_size, len(GROUP.heads), GROUP.channels
BYTES = int(np.prod(SHAPE)) * 2
AXES = "block slot head channel"


class CudaArray:
    """As CuPy's, of memory that is nowhere."""

    def __init__(self, address, strides=None, device=0, read_only=False):
        self.__cuda_array_interface__ = {
            "version": 3, "shape": SHAPE, "typestr": "<f2", "data": (address, read_only), "strides": strides,
        }  # fmt: skip
        if device is not None:
            self.__dlpack_device__ = lambda: (2, device)


class TorchTensor:
    dtype = "torch.float16"

    def __init__(self, address, device):
        self.address, self.device, self.shape = address, device, SHAPE

    def data_ptr(self):
        return self.address

    def stride(self):
        return [int(np.prod(SHAPE[axis + 1 :])) for axis in range(4)]

    def element_size(self):
        return 2

    def untyped_storage(self):
        class Storage:
            data_ptr = self.data_ptr

            def nbytes(self):
                return BYTES

        return Storage()


def described(make, **options):
    addresses = itertools.count(1 << 40, 1 << 20)
    tensors = {PlaneKey(GROUP.name, plane.layer, plane.kind): make(next(addresses)) for plane in GROUP.planes}
    return Caches.from_tensors(tensors, SPEC.groups, SPEC.identity, SPEC.place, axes=AXES, **options)


@pytest.mark.parametrize("make", [lambda at: CudaArray(at, device=1), lambda at: TorchTensor(at, "cuda:1")])
def test_arrays_say_which_gpu_they_are_on(make):
    caches = described(make)
    assert caches.device == "cuda:1"
    assert not caches.on_host
    assert [region.length for region in caches.regions] == [BYTES] * len(GROUP.planes)
    assert caches.spec.groups[0].planes[0].slot_stride == 2 * SHAPE[2] * SHAPE[3]


def test_true_strides_are_read():
    """D5: as the array states them, not as its shape suggests."""
    strides = (BYTES // SHAPE[0] * 2, 2 * SHAPE[3], 2 * SHAPE[3] * SHAPE[1], 2)
    caches = described(lambda at: CudaArray(at, strides))
    plane = caches.spec.groups[0].planes[0]
    assert (plane.block_stride, plane.slot_stride, plane.head_stride) == strides[:3]


def test_memory_that_is_not_to_be_written_is_remembered():
    assert not described(lambda at: CudaArray(at, read_only=True)).regions[0].writable


def test_a_gpu_that_nobody_names_is_asked_for_and_can_be_stated():
    with pytest.raises(LayoutError, match=r"does not say which GPU.*device='cuda:0'"):
        described(lambda at: CudaArray(at, device=None))
    assert described(lambda at: CudaArray(at, device=None), device="cuda:3").device == "cuda:3"


def test_a_rank_has_one_device():
    devices = itertools.cycle([0, 1])
    with pytest.raises(LayoutError, match=r"lies on cuda:1.*a rank has one device"):
        described(lambda at: CudaArray(at, device=next(devices)))
    with pytest.raises(LayoutError, match=r"lies on cuda:0, the others .* on cuda:1"):
        described(CudaArray, device="cuda:1")


def test_pointers_lie_where_the_caller_says():
    row = 2 * SHAPE[3]
    span = [Span(place << 40, BYTES, BYTES // SHAPE[0], row * SHAPE[2], row) for place in (1, 2)]
    planes = {PlaneKey(GROUP.name, 0, plane.kind): place for plane, place in zip(GROUP.planes, span, strict=True)}
    made = Caches.from_pointers(planes, SPEC.groups, SPEC.identity, SPEC.place, device="cuda:0")
    assert made.device == "cuda:0"
    with pytest.raises(LayoutError, match="not on 'gpu'"):
        Caches.from_pointers(planes, SPEC.groups, SPEC.identity, SPEC.place, device="gpu")


class Handles:
    def __init__(self, **names):
        self.__dict__.update(names)


def test_events_and_streams_of_any_library_are_handles():
    assert [event_handle(it) for it in (7, Handles(cuda_event=8), Handles(ptr=9), Handles(handle=10))] == [7, 8, 9, 10]
    cuda_python = Handles()
    type(cuda_python).__cuda_stream__ = lambda _: (0, 11)
    assert [stream_handle(it) for it in (0, Handles(cuda_stream=8), Handles(ptr=9), cuda_python)] == [0, 8, 9, 11]


@pytest.mark.parametrize("wrong", [0, -1, True, "7", None, Handles(cuda_event=0)])
def test_what_is_no_recorded_event_is_refused(wrong):
    with pytest.raises(LayoutError, match="no recorded CUDA event"):
        event_handle(wrong)


@pytest.mark.parametrize("wrong", [-1, True, "7", None])
def test_what_is_no_stream_is_refused(wrong):
    with pytest.raises(LayoutError, match="no CUDA stream"):
        stream_handle(wrong)
