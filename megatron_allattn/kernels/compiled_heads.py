"""The heads of the `blocked` backend in C++ (heads.cpp), for a CPU, where masks do not multiply.

They do what blocked_heads.py does, in smaller units, but whole heads run side by side, one thread each, and rows pass
through softmax and dropout once, in the first-level cache. Matrix products are PyTorch's.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_allattn.kernels.blocked_call import BlockedCall, Gradients, Projected
from megatron_allattn.kernels.interface import wide_type
from megatron_allattn.parallel.random import drop_threshold

# Rows of a unit, where tiles and streams allow: a thread's scores are 1.2 MB in both, with S + N = 1200. In bfloat16
# fewer rows are too little work for a product.
ROWS = {torch.float32: 256, torch.float64: 256, torch.bfloat16: 512}


def can_compute(call: BlockedCall) -> bool:
    """Nothing is computed on the meta device, but scratch memory is taken as if it were."""
    return call.columns.factors is None and call.block.device.type in ("cpu", "meta") and call.block.dtype in ROWS


_NUMBERS = ("batch", "length", "tile", "heads", "size", "persistent", "hidden", "rows", "longest", "positions", "known")
_WIDE = ("bias", "dbias", "dedges", "dposition_key")  # float32 at least
_INTEGERS = ("row_keys", "pair_keys")  # int32


class _Call(ctypes.Structure):
    """`Call` of heads.cpp, field by field; that its size is the same is asserted for every call."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("spans", ctypes.c_void_p),
        ("biased", ctypes.c_void_p),
        ("edges", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("position_key", ctypes.c_void_p),
        ("persistent_key", ctypes.c_void_p),
        ("persistent_value", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("key_weight", ctypes.c_void_p),
        ("value_weight", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("cached", ctypes.c_int64),
        ("cache_stride", ctypes.c_int64),
        ("cache_row_stride", ctypes.c_int64),
        ("kept_keys", ctypes.c_void_p),
        ("kept_values", ctypes.c_void_p),
        ("kept_spans", ctypes.c_void_p),
        ("kept_starts", ctypes.c_void_p),
        ("kept_stride", ctypes.c_int64),
        ("row_keys", ctypes.c_void_p),
        ("pair_keys", ctypes.c_void_p),
        ("threshold", ctypes.c_int64),
        ("shared", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("y", ctypes.c_void_p),
        ("dy", ctypes.c_void_p),
        ("dq", ctypes.c_void_p),
        ("dk", ctypes.c_void_p),
        ("dv", ctypes.c_void_p),
        ("dkey_weight", ctypes.c_void_p),
        ("dvalue_weight", ctypes.c_void_p),
        ("dpersistent_key", ctypes.c_void_p),
        ("dpersistent_value", ctypes.c_void_p),
        ("dposition_key", ctypes.c_void_p),
        ("dpositions", ctypes.c_void_p),
        ("dbias", ctypes.c_void_p),
        ("dedges", ctypes.c_void_p),
        ("message", ctypes.c_char * 400),
    )


class CompiledHeads:
    """`Heads` of one call that `can_compute` allows. library: of `load_library`."""

    def __init__(self, library: ctypes.CDLL, call: BlockedCall) -> None:
        assert library.call_bytes() == ctypes.sizeof(_Call)
        self._library, self._call = library, call

    def forward(self, projected: Projected) -> Tensor:
        y = torch.empty_like(projected.q)
        self._run(_Arguments(self._call, projected).write(y=y), backward=False)
        return y

    def backward(self, projected: Projected, dy: Tensor, grads: Gradients) -> Projected:
        call = self._call
        of = Projected(*(torch.empty_like(one) for one in (projected.q, projected.k, projected.v)))
        shape = (call.heads, call.size, call.columns.longest)
        arguments = _Arguments(call, projected).write(
            dy=dy.contiguous(),
            dq=of.q,
            dk=of.k,
            dv=of.v,
            dkey_weight=grads.key,
            dvalue_weight=grads.value,
            dpersistent_key=grads.persistent_key,
            dpersistent_value=grads.persistent_value,
            dposition_key=grads.position_key,
            dpositions=call.workspace.take("positions", shape, call.block.dtype, call.block.device),
            dbias=grads.columns,
            dedges=grads.edges,
        )
        self._run(arguments, backward=True)
        return of

    def _run(self, arguments: "_Arguments", backward: bool) -> None:
        """Raises RuntimeError where a product fails, or memory, with what PyTorch or C++ says."""
        call, name = self._call, str(self._call.block.dtype).removeprefix("torch.")
        described = ctypes.byref(arguments.described)
        count = getattr(self._library, f"scratch_bytes_{name}")
        count.restype = ctypes.c_int64
        scratch = call.workspace.take("heads", (count(described, backward),), torch.uint8, call.block.device)
        if call.block.device.type == "meta":
            return
        if not getattr(self._library, f"run_{name}")(described, ctypes.c_void_p(scratch.data_ptr()), backward):
            raise RuntimeError(f"a head of attention failed: {arguments.described.message.decode(errors='replace')}")


class _Arguments:
    """A `_Call`, and what keeps its addresses valid."""

    def __init__(self, call: BlockedCall, projected: Projected) -> None:
        weights, columns, dropout = call.weights, call.columns, call.dropout
        self._call = call
        cache = call.cache if call.cache.stride(2) == 1 else call.cache.contiguous()
        self._check("cache", cache)
        self._held: list[object] = [cache]
        self.described = _Call(
            batch=call.batch,
            length=call.length,
            tile=call.tile,
            heads=call.heads,
            size=call.size,
            persistent=call.persistent,
            hidden=call.block.shape[2],
            rows=ROWS[call.block.dtype],
            longest=columns.longest,
            positions=weights.position_key.shape[2],
            known=call.known,
            spans=self._numbers(columns.spans),
            biased=self._numbers(columns.biased),
            edges=self._numbers(self._edges()),
            cache=cache.data_ptr(),
            cached=cache.shape[1],
            cache_stride=cache.stride(0),
            cache_row_stride=cache.stride(1),
            threshold=0 if dropout is None else drop_threshold(dropout.probability),
            shared=call.shared,
            threads=torch.get_num_threads(),
        )
        self._read(
            bias=columns.bias,
            position_key=weights.position_key,
            persistent_key=weights.persistent_key,
            persistent_value=weights.persistent_value,
            q=projected.q,
            k=projected.k,
            v=projected.v,
            key_weight=weights.key,
            value_weight=weights.value,
            row_keys=None if dropout is None else dropout.rows,
            pair_keys=None if dropout is None else dropout.pairs,
        )
        if (kept := call.kept) is not None:
            assert kept.keys.stride() == kept.values.stride() and kept.keys.stride()[1:] == (call.size, 1)
            self._check("kept_keys", kept.keys)
            self._check("kept_values", kept.values)
            self._held.append(kept)
            self.described.kept_keys, self.described.kept_values = kept.keys.data_ptr(), kept.values.data_ptr()
            self.described.kept_stride = kept.keys.stride(0)
            self.described.kept_spans = self._numbers(kept.spans)
            self.described.kept_starts = self._numbers(kept.starts)

    def _check(self, name: str, tensor: Tensor) -> None:
        block = self._call.block
        own = torch.int32 if name in _INTEGERS else wide_type(block.dtype) if name in _WIDE else block.dtype
        if tensor.dtype != own or tensor.device.type != block.device.type:
            found, wanted = f"{tensor.dtype} on {tensor.device}", f"{own} on {block.device}"
            raise ValueError(f"{name} {found}: with a block of {block.dtype} it must be {wanted}")

    def _edges(self) -> Sequence[int]:
        edges = self._call.columns.edges
        return [0] * self._call.heads if edges is None or edges.device.type == "meta" else edges.tolist()

    def _numbers(self, numbers: Sequence[int]) -> int:
        """The address of int64 [H]."""
        array = (ctypes.c_int64 * len(numbers))(*numbers)
        self._held.append(array)
        return ctypes.addressof(array)

    def _read(self, **tensors: Tensor | None) -> None:
        """Put in the addresses of these, or of copies with rows one after the other."""
        self.write(**{name: None if tensor is None else tensor.contiguous() for name, tensor in tensors.items()})

    def write(self, **tensors: Tensor | None) -> "_Arguments":
        """Put in the addresses of these. Raises ValueError: one has not the type that is read or written there."""
        for name, tensor in tensors.items():
            assert tensor is None or tensor.is_contiguous(), name
            if tensor is not None:
                self._check(name, tensor)
            self._held.append(tensor)
            setattr(self.described, name, None if tensor is None else tensor.data_ptr())
        return self
